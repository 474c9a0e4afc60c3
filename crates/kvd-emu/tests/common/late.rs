//! Pairs whose kernels with products on tensor cores are compiled when a model is registered: those
//! that the lane has (`kernels/emu/late`).

use kvd_cuda::Kernel;

/// Keys, values, whether they hold Huffman codes, whether heads of 48 and 80 channels have such
/// products too, and codecs of such pages.
pub(crate) const TENSOR: [(Kernel, Kernel, bool, bool, &[&str]); 11] = [
    (
        Kernel::Vq,
        Kernel::Uniform,
        false,
        true,
        &[
            "k=vq(d=4,b=8); v=uniform(b=2,axis=token)",
            "k=vq(d=2,b=4); v=mean+gain/uniform(b=3,axis=token)",
        ],
    ),
    (
        Kernel::Uniform,
        Kernel::Vq,
        false,
        true,
        &[
            "k=uniform(b=2,g=32,axis=channel); v=vq(d=4,b=8)",
            "k=uniform(b=5,axis=token); v=vq(d=2,b=4)",
        ],
    ),
    (
        Kernel::Hybrid,
        Kernel::Vq,
        false,
        false,
        &["k=uniform(b=2,g=32,axis=token,mode=hybrid); v=gain/vq(d=4,b=8,scope=group)"],
    ),
    (
        Kernel::Polar,
        Kernel::Hybrid,
        false,
        true,
        &[
            "k=polar(a=4,r=2,g=64); v=uniform(b=2,g=32,axis=channel,mode=hybrid)",
            "k=polar(a=3,r=2,g=32); v=gain/uniform(b=3,g=64,axis=channel,mode=hybrid)",
        ],
    ),
    (
        Kernel::Lloyd,
        Kernel::BitAlloc,
        false,
        true,
        &["k=rotate/lloyd(b=3); v=mean+pca/bitalloc(b=2)"],
    ),
    (
        Kernel::BitAlloc,
        Kernel::Uniform,
        false,
        true,
        &["k=mean+pca/bitalloc(b=2); v=uniform(b=2,axis=token)"],
    ),
    (Kernel::F16, Kernel::Uniform, false, true, &["k=f16; v=uniform(b=2,axis=token)"]),
    (
        Kernel::Uniform,
        Kernel::Fp8,
        false,
        true,
        &["k=uniform(b=2,g=32,axis=channel); v=hadamard/fp8", "k=uniform(b=3,axis=token); v=fp8"],
    ),
    // Rows as values change places within lines, so that the keys in front of them end with one.
    (
        Kernel::Uniform,
        Kernel::F16,
        false,
        true,
        &["k=uniform(b=2,g=32,axis=channel); v=f16", "k=uniform(b=5,axis=token); v=hadamard/f16"],
    ),
    (
        Kernel::Polar,
        Kernel::Bf16,
        false,
        true,
        &["k=polar(a=4,r=2,g=64); v=bf16", "k=polar(a=3,r=2,g=32); v=gain/bf16"],
    ),
    (
        Kernel::Grid,
        Kernel::Uniform,
        true,
        true,
        &[
            "k=mean+qpca/grid(rate=2.35)/huffman; v=uniform(b=2,axis=token)",
            "k=mean+qpca/grid(rate=2.35)/huffman; v=uniform(b=3,axis=token)/huffman",
        ],
    ),
];
