"""Hours of use in minutes: groups that form, work, fail and form again, and what is left of them.

====================  ==========================================================================
module                holds
====================  ==========================================================================
`plan`                what a round is: who has which rank, with which options, how it ends
`collectives`         a round of random collectives, each compared with the exact result
`training`            a round of training steps under the strategy
`member`              a process of a crew: one round after the other, measured in between
`belongings`          what a process holds: memory, descriptors, threads, sockets
`crew`                the processes of one part of the soak; replaces those that were killed
`verdict`             whether what they held stayed flat
`report`              the tables
====================  ==========================================================================
"""
