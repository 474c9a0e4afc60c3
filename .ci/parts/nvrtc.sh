# The real NVRTC compiles every side; its wheel is a download.
# guards: kernels/include crates/kvd-cuda
set -euo pipefail
source .ci/lib.sh
nvrtc=target/nvrtc
python3 -m pip install --quiet --no-deps --upgrade -t "$nvrtc" nvidia-cuda-nvrtc==13.0.88 ||
    { lacking nvrtc: nvidia-cuda-nvrtc cannot be installed; exit; }
LD_LIBRARY_PATH="$PWD/$nvrtc/nvidia/cu13/lib" KVD_REQUIRE_NVRTC=1 tested --test nvrtc
