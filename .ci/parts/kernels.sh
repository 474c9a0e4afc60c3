# All kernels for all GPUs, warnings and spills fatal; pages without fused products; instructions a
# value takes; a program that embeds the kernels. Their compiler is a download of 105 MB.
# guards: kernels crates/kvd-cuda xtask/src/kernels.rs xtask/src/kernels xtask/src/fused.rs
set -euo pipefail
source .ci/lib.sh
! is_strict || export KVD_REQUIRE_KERNELS=1
xtask kernels --skip-offline
if ! compgen -G "target/kernels/*.fatbin" >/dev/null; then
    lacking kernels: their compiler cannot be installed
    exit
fi
xtask fused --skip-offline
# A count of instructions in disassembly: no value takes more than it did, and nothing spills.
for sm in 80 89 90; do
    python3 kernels/gpu/count.py --sm "$sm" --check
done
tested --features kvd/gpu-kernels --test gpu --test on_device
