#!/bin/bash
# Make the Soft-RoCE guest from Debian packages only; nothing is installed on the host, and no emulator is run.
#
#   build_guest.sh [-f]         -f: build even if the guest is up to date
#
# Into $GPUNETIO_GUEST, or gpunetio/guest below the user's cache folder:
#   vmlinux        Debian's kernel, uncompressed
#   initramfs.gz   busybox, ip, rdma, the modules of Soft-RoCE, ./init
#   rootfs/        the user land where commands run: python3 with pyverbs, numpy, click and rich, ibverbs-utils, perftest,
#                  rdmacm-utils, ab
#   stamp          hash of this script and ./init, written last: a guest with another one is built anew
# Prints the folder. Needs apt (Debian 12), dpkg-deb, python3, gzip, flock; about 15 s, 150 MB of downloads.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
OUT=${GPUNETIO_GUEST:-${XDG_CACHE_HOME:-$HOME/.cache}/gpunetio/guest}
mkdir -p "$OUT"
cd "$OUT"

# run_guest.sh holds the lock shared: a guest in use is not replaced, and asking whether it is up to date waits for
# builders only, not for the guests that run.
exec 9>lock
busy() { echo "another process builds or uses $OUT" >&2; exit 1; }
stamp=$(cat "$HERE/build_guest.sh" "$HERE/init" | sha256sum | cut -d' ' -f1)
current() { [ "$(cat stamp 2>/dev/null)" = "$stamp" ] && echo "$OUT"; }
if [ "${1:-}" != -f ]; then
    flock -s -w 600 9 || busy
    current && exit
    flock -u 9
fi
flock -w 600 9 || busy
[ "${1:-}" != -f ] && current && exit # built meanwhile
rm -rf stamp pkgs kernel rootfs ird vmlinux initramfs.gz

PACKAGES="busybox-static dash coreutils iproute2 iputils-ping ibverbs-providers ibverbs-utils perftest
    rdmacm-utils python3-pyverbs python3-numpy python3-click python3-rich apache2-utils"
# Dependencies are added, and come first.
MODULES="virtio_pci virtio_net virtio_rng crc32_generic crc32_pclmul rdma_rxe rdma_ucm 9pnet_virtio 9p overlay
    sch_prio sch_netem cls_u32"
LIBS=usr/lib/x86_64-linux-gnu

# ---- packages: apt against an empty status file fetches the whole closure, whatever the host has
mkdir -p pkgs/archives/partial
: >pkgs/status
apt() { apt-get -y -qq -o APT::Sandbox::User=root "$@" >/dev/null; }
fetch() {
    # shellcheck disable=SC2086
    apt -o Dir::State::status="$PWD/pkgs/status" -o Dir::Cache::archives="$PWD/pkgs/archives" \
        -o Debug::NoLocking=1 --no-install-recommends --download-only install $PACKAGES &&
        kernel=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ {print $2; exit}') &&
        (cd pkgs && apt download "$kernel")
}
fetch || { apt update && rm -f pkgs/archives/*.deb && fetch; } # package lists missing or out of date
mkdir rootfs kernel
for deb in pkgs/archives/*.deb; do dpkg-deb -x "$deb" rootfs; done
dpkg-deb -x pkgs/linux-image-*.deb kernel

# ---- kernel: QEMU boots the ELF file inside bzImage directly; unpacking it under TCG would take 3 s
python3 - kernel/boot/vmlinuz-* <<'PY'
import lzma, sys
image = open(sys.argv[1], "rb").read()
start = image.find(b"\xfd7zXZ\0", 0x4000)
if start < 0:
    sys.exit(f"{sys.argv[1]} is not packed with xz, as Debian 12's kernel is")
open("vmlinux", "wb").write(lzma.LZMADecompressor().decompress(image[start:]))
PY

# ---- rootfs: what the packages' scripts would have done
mkdir -p rootfs/{proc,sys,dev,run,tmp,root,lib64,job,share}
ln -sf "$(basename rootfs/usr/bin/python3.[0-9]*)" rootfs/usr/bin/python3
ln -sf dash rootfs/bin/sh
for lib in blas lapack; do ln -sf $lib/lib$lib.so.3 rootfs/$LIBS/lib$lib.so.3; done
echo root:x:0:0:root:/root:/bin/sh >rootfs/etc/passwd
echo root:x:0: >rootfs/etc/group
echo '127.0.0.1 localhost' >rootfs/etc/hosts
# Compiled once here, not at every import there: the guest sees this tree read-only, and TCG is slow.
chroot rootfs python3 -m compileall -qq /usr/lib/python3 "/usr/lib/$(readlink rootfs/usr/bin/python3)" || true

# ---- initramfs
mkdir -p ird/{bin,sbin,lib64,lib/x86_64-linux-gnu,proc,sys,dev,tmp,mnt,modules}
cp rootfs/bin/busybox ird/bin/busybox
for applet in $(ird/bin/busybox --list); do [ "$applet" = busybox ] || ln -sf busybox "ird/bin/$applet"; done
ln -s ../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2 ird/lib64/ld-linux-x86-64.so.2
# shellcheck disable=SC2086
python3 - $MODULES <<'PY'
"""Copy modules and programs with all that they need: found by reading the files, so nothing runs and any root will do."""
import os, re, shutil, struct, sys

def modinfo(path):
    blob = open(path, "rb").read()
    found = re.search(rb"(?:^|\0)depends=([^\0]*)\0", blob)
    names = found[1].decode().split(",") if found and found[1] else []
    for text in re.findall(rb"\0softdep=([^\0]*)\0", blob):
        before = re.search(r"pre:\s*((?:(?!post:).)*)", text.decode())
        names += before[1].split() if before else []
    return names

files = {name[:-3].replace("-", "_"): os.path.join(folder, name)
         for folder, _, names in os.walk("kernel/lib/modules") for name in names if name.endswith(".ko")}
order = []
def module(name):
    name = name.replace("-", "_")
    if name in files:  # the others are built in
        path = files.pop(name)
        for other in modinfo(path):
            module(other)
        shutil.copy(path, "ird/modules")
        order.append(os.path.basename(path))
for name in sys.argv[1:]:
    module(name)
assert "rdma_rxe.ko" in order, "no rdma_rxe.ko in the kernel package"
open("ird/modules/order", "w").write("\n".join(order) + "\n")

def needed(path):
    """DT_NEEDED of an ELF file."""
    blob = open(path, "rb").read()
    at, = struct.unpack_from("<Q", blob, 32)
    count, = struct.unpack_from("<H", blob, 56)
    headers = [struct.unpack_from("<IIQQQQQQ", blob, at + 56 * i) for i in range(count)]
    dynamic = [(h[2], h[5]) for h in headers if h[0] == 2]
    if not dynamic:
        return []
    offset, size = dynamic[0]
    tags = [struct.unpack_from("<QQ", blob, offset + 16 * i) for i in range(size // 16)]
    table = next(value for tag, value in tags if tag == 5)
    table = next(table - h[3] + h[2] for h in headers if h[0] == 1 and h[3] <= table < h[3] + h[5])
    return [blob[table + v : blob.index(b"\0", table + v)].decode() for tag, v in tags if tag == 1]

have = set()
def library(name):
    if name not in have:
        have.add(name)
        path = next(p for p in (f"rootfs/{d}/{name}" for d in
                    ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64")) if os.path.exists(p))
        shutil.copy(os.path.realpath(path), f"ird/lib/x86_64-linux-gnu/{name}")
        for other in needed(path):
            library(other)
for program in ("bin/dash", "bin/ip", "usr/bin/rdma"):
    target = f"ird/bin/{os.path.basename(program)}"
    if os.path.lexists(target):
        os.unlink(target)  # busybox has an `ip` of its own
    shutil.copy(f"rootfs/{program}", target)
    for name in needed(target):
        library(name)
PY
ln -sf dash ird/bin/sh  # not busybox: its shell prefers its own applets (ip!) to programs in PATH
cp "$HERE/init" ird/init
chmod 755 ird/init
(cd ird && find . | "$OUT/rootfs/bin/busybox" cpio -o -H newc 2>/dev/null) | gzip -6 >initramfs.gz
rm -rf pkgs kernel ird
echo "$stamp" >stamp
echo "$OUT"
