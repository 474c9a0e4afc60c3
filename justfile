# The verbs of this repository; each line also works without just.

# Format, lints, generated files and house rules: before every commit.
check:
    cargo xtask ci

# The README's test command; arguments go to cargo: `just test -p kvd-codec`.
test *arguments:
    cargo test --workspace {{arguments}}

# Attention and encoding on this machine, optimised.
bench *arguments:
    cargo run --release -- bench attend {{arguments}}

# CUDA kernels for all GPUs, and the exactness of store kernels; no GPU.
kernels:
    cargo xtask kernels
    cargo xtask fused

# What CI runs beside the required part: all deep parts, or those named.
deep *parts:
    .ci/run --only {{ if parts == "" { "--all" } else { parts } }}

# The release archive of this machine's architecture, with checksums.
release out="target/release-archive":
    deploy/release.sh {{out}}

# One engine's environment and tests: transformers, vllm, lmcache, sglang or candle.
engines name:
    .ci/run --only {{name}}
