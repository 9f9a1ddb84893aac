#!/bin/busybox sh
# First program of a machine: puts an overlay in memory over the host's files, and starts there what `start=` names.
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
while read -r module; do $B insmod "$module"; done < /modules
$B mkdir -p /lower /upper /new
$B mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288,ro,cache=loose host /lower
$B mount -t tmpfs -o size=90% upper /upper
$B mkdir -p /upper/files /upper/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /new
for directory in proc sys dev; do $B mount --move /$directory /new/$directory; done
$B mkdir -p /new/dev/shm /new/dev/pts
$B mount -t tmpfs shm /new/dev/shm
$B mount -t devpts pts /new/dev/pts
$B mount -t tmpfs run /new/run
start=$($B sed 's/.*start=\([^ ]*\).*/\1/' /new/proc/cmdline)
exec $B switch_root /new /bin/bash "$start"
