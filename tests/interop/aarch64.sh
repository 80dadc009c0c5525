#!/bin/bash
# Python of 64-bit Arm on another machine, under QEMU's user-mode emulation: nothing is installed on the host.
#
#   aarch64.sh ARGUMENTS…       run it, e.g. -m pytest tests/nic/test_nic.py
#   aarch64.sh --wheel          build a wheel with compiled code for aarch64, into dist/ (7 minutes on a quiet machine)
#
# Below $GPUNETIO_AARCH64, or gpunetio/aarch64 in the user's cache folder:
#   rootfs/    Debian's python3 and C library for arm64, and the wheels of what the package and its tests need
#   qemu/      qemu-aarch64-static
#   python     what `sys.executable` is there, so that child processes are emulated, too
#   stamp      hash of this script, written last: an environment with another one is made anew
# Needs apt (Debian 12), dpkg-deb, python3 with pip. The emulation is about ten times slower than the machine, and
# orders memory accesses as the machine does: x86 hides what Arm may reorder.
set -euo pipefail
HERE=$(cd "$(dirname "$0")/../.." && pwd)
OUT=${GPUNETIO_AARCH64:-${XDG_CACHE_HOME:-$HOME/.cache}/gpunetio/aarch64}
PYTHON=3.11 # Debian 12's

make_environment() {
    rm -rf stamp apt qemu rootfs wheels
    mkdir -p apt/state/lists/partial apt/cache/archives/partial qemu rootfs wheels
    : >apt/status
    apt() {
        apt-get -y -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
            -o Dir::State="$OUT/apt/state" -o Dir::State::status="$OUT/apt/status" -o Dir::Cache="$OUT/apt/cache" "$@" >&2
    }
    (cd qemu && apt-get -qq download qemu-user-static >&2)
    dpkg-deb -x qemu/*.deb qemu
    apt update
    apt --no-install-recommends --download-only install python3 libc6 libstdc++6
    for package in apt/cache/archives/*.deb; do dpkg-deb -x "$package" rootfs; done
    local site="$OUT/rootfs/usr/lib/python3/dist-packages" glibc
    local platforms=()
    for glibc in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${glibc}_aarch64"); done
    python3 -m pip download -q --dest wheels --only-binary=:all: --implementation cp --python-version $PYTHON \
        "${platforms[@]}" --platform manylinux2014_aarch64 build $(sed -n "/>= '3\.1[2-9]'/d; s/^\([a-z0-9_-]*==[^ ]*\).*/\1/p" \
            "$HERE/requirements.txt") pytest pytest-timeout hypothesis scapy >&2
    for wheel in wheels/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
    printf '#!/bin/sh\nexec %s -L %s %s "$@"\n' "$OUT/qemu/usr/bin/qemu-aarch64-static" "$OUT/rootfs" \
        "$OUT/rootfs/usr/bin/python$PYTHON" >python
    chmod +x python
    echo "import sys; sys.executable = '$OUT/python'" >"$site/emulated.pth"
    rm -rf apt wheels
    echo "$stamp" >stamp
}

mkdir -p "$OUT"
stamp=$(sha256sum "$0" | cut -d' ' -f1)
exec 9>"$OUT/lock"
flock -w 600 9 || { echo "another process makes $OUT" >&2; exit 1; }
[ "$(cat "$OUT/stamp" 2>/dev/null)" = "$stamp" ] || (cd "$OUT" && make_environment)
flock -u 9

export PYTHONHOME=$OUT/rootfs/usr LD_LIBRARY_PATH=
if [ "${1:-}" = --wheel ]; then
    GPUNETIO_PREBUILT=1 exec "$OUT/python" -m build --wheel --no-isolation --outdir "$HERE/dist" "$HERE"
fi
export PYTHONPATH=$HERE/src${PYTHONPATH:+:$PYTHONPATH}
exec "$OUT/python" "$@"
