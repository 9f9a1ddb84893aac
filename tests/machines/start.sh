# Second program of a machine: its name, its network and its disk, then a server of ssh for the tests.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
value() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
number=$(value machine)
hostname "machine$number"
ip link set lo up
ip address add "10.77.0.1$number/24" dev eth0
ip link set eth0 mtu "$(value mtu)" up
cp "$(dirname "$(value start)")/hosts" /etc/hosts
mkdir -p /disk /run/sshd
mount -t ext4 /dev/vda /disk
echo "machine $number runs $(uname -r)"
/usr/sbin/sshd -D -e -f "$(dirname "$(value start)")/sshd_config"
