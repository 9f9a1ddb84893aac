"""Times of collectives on machines that nobody has here: in virtual time, by the core's model.

``options`` checks what is asked, ``simulation`` asks the core and prints, ``picture`` draws.
"""
