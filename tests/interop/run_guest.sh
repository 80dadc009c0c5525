#!/bin/bash
# Boot the Soft-RoCE guest of build_guest.sh, run a command in it, return its status.
#
#   run_guest.sh [options] -- COMMAND...    (words are joined; run by /bin/sh in the guest, in /job)
#   -f FILE      copy FILE to the guest's /job (may be given again)     -S DIR  share DIR, read-only, as /share
#   -s N         CPUs (2: with one, latency is milliseconds)     -m MB  memory (768)
#   -t SECONDS   limit of the whole run (180)                    -P PID  end when process PID has ended
#   -M MTU       of tap0 and of the guest's eth0 (1500: path MTU 1024; 9000: 4096)
#   -N NAME      of the network namespace, made and removed here (gn-<pid>)
#   -p FILE      write all packets of the NIC to a pcap file
#   -u PATH      a second NIC, eth1, whose cable is a Unix socket at PATH: QEMU's `-netdev stream`, which listens there
#   -o DIR       console.log, status.log, qemu.log (default: a temporary folder, removed at the end)
# In the namespace: tap0, 10.77.0.1 and .3, fd77::1 and ::3; the guest: 10.77.0.2 and fd77::2, RDMA device rxe0. No other way out.
# Status: the command's; 124 time limit; 125 the guest died or did not come up.
# Needs root (namespace, tap), qemu-system-x86, iproute2. TCG, never KVM: the same everywhere, nested or not.
set -u
guest=${GPUNETIO_GUEST:-${XDG_CACHE_HOME:-$HOME/.cache}/gpunetio/guest}
files=() share='' cpus=2 memory=768 limit=180 parent=$$ mtu=1500 ns=gn-$$ pcap='' logs='' cable='' temporary='' qemu=''
while getopts f:S:s:m:t:P:M:N:p:u:o: option; do
    case $option in
    f) files+=("$OPTARG") ;; S) share=$OPTARG ;; s) cpus=$OPTARG ;; m) memory=$OPTARG ;; t) limit=$OPTARG ;; P) parent=$OPTARG ;;
    M) mtu=$OPTARG ;; N) ns=$OPTARG ;; p) pcap=$OPTARG ;; u) cable=$OPTARG ;; o) logs=$OPTARG ;; *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ -e "$guest/stamp" ] || { echo "no guest in $guest: run build_guest.sh" >&2; exit 125; }
exec 9<"$guest/lock" && flock -s -w 600 9 || exit 125
[ -n "$logs" ] || logs=$(mktemp -d) temporary=$logs
mkdir -p "$logs"
work=$(mktemp -d)
cleanup() {
    [ -n "$qemu" ] && kill "$qemu" 2>/dev/null && wait "$qemu" 2>/dev/null
    ip netns del "$ns" 2>/dev/null
    rm -rf "$work" ${temporary:+"$temporary"}
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

# A second archive behind the first one: the kernel unpacks both.
mkdir "$work/job"
printf 'cd /job\n%s\n' "$*" >"$work/job/cmd.sh"
printf 'GUEST_IP=10.77.0.2\nGUEST_IP6=fd77::2\nNETMTU=%s\nSHARE=%s\n' "$mtu" "${share:+1}" >"$work/job/env"
[ ${#files[@]} -eq 0 ] || cp "${files[@]}" "$work/job" || exit 125
(cd "$work" && find job | "$guest/rootfs/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1) >"$work/job.gz"
cat "$guest/initramfs.gz" "$work/job.gz" >"$work/initrd"

set -e
ip netns add "$ns"
ip -n "$ns" link set lo up
ip -n "$ns" tuntap add dev tap0 mode tap
ip -n "$ns" link set tap0 mtu "$mtu" up
ip -n "$ns" addr add 10.77.0.1/24 dev tap0
ip -n "$ns" -6 addr add fd77::1/64 dev tap0 nodad
ip -n "$ns" addr add 10.77.0.3/24 dev tap0
ip -n "$ns" -6 addr add fd77::3/64 dev tap0 nodad
set +e

shared=()
[ -z "$share" ] || shared=(-fsdev "local,id=share,path=$share,security_model=none,readonly=on"
    -device virtio-9p-pci,fsdev=share,mount_tag=share)
second=()
[ -z "$cable" ] || second=(-netdev "stream,id=cable,server=on,addr.type=unix,addr.path=$cable"
    -device "virtio-net-pci,netdev=cable,mac=52:54:00:78:00:02,romfile=")
capture=()
[ -z "$pcap" ] || capture=(-object "filter-dump,id=dump,netdev=net,file=$pcap")
: >"$logs/console.log" >"$logs/status.log"
# no_timer_check: on a busy machine the emulated timer is late, and the kernel would give up.
ip netns exec "$ns" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -M q35 -smp "$cpus" -m "$memory" \
    -nodefaults -no-user-config -display none -no-reboot -kernel "$guest/vmlinux" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check" \
    -serial "file:$logs/console.log" -serial "file:$logs/status.log" \
    -netdev "tap,id=net,ifname=tap0,script=no,downscript=no,vhost=off,vnet_hdr=off" \
    -device "virtio-net-pci,netdev=net,mac=52:54:00:77:00:02,romfile=" "${second[@]}" -device virtio-rng-pci \
    -fsdev "local,id=fs,path=$guest/rootfs,security_model=none,readonly=on" \
    -device virtio-9p-pci,fsdev=fs,mount_tag=rootfs "${shared[@]}" "${capture[@]}" >"$logs/qemu.log" 2>&1 &
qemu=$!

status=125
until=$((SECONDS + limit))
while :; do
    kill -0 $qemu 2>/dev/null && alive=1 || alive=  # before the log is read: what it says last counts
    said=$(<"$logs/status.log")
    if [[ $said =~ @@RC\ ([0-9]+) ]]; then
        status=${BASH_REMATCH[1]}
        break
    fi
    [[ $said == *@@FAIL* ]] && break
    [ -n "$alive" ] || break
    [ -e "/proc/$parent/exe" ] || break  # not so for a zombie, either
    [ $SECONDS -lt $until ] || { status=124; break; }
    sleep 0.1
done
cat "$logs/console.log"
[ $status = 125 ] && { grep -a @@FAIL "$logs/status.log"; cat "$logs/qemu.log"; } >&2
exit $status
