//! Pairs whose kernels with products on tensor cores are compiled when a model is registered: those
//! that the lane has (`kernels/emu/late`).

use kvd_cuda::SideKernel;

/// Keys, values, whether they hold Huffman codes, whether heads of 48 and 80 channels have such
/// products too, and codecs of such pages.
pub(crate) const TENSOR: [(SideKernel, SideKernel, bool, bool, &[&str]); 11] = [
    (
        SideKernel::Vq,
        SideKernel::Uniform,
        false,
        true,
        &[
            "k=vq(d=4,b=8); v=uniform(b=2,axis=token)",
            "k=vq(d=2,b=4); v=mean+gain/uniform(b=3,axis=token)",
        ],
    ),
    (
        SideKernel::Uniform,
        SideKernel::Vq,
        false,
        true,
        &[
            "k=uniform(b=2,g=32,axis=channel); v=vq(d=4,b=8)",
            "k=uniform(b=5,axis=token); v=vq(d=2,b=4)",
        ],
    ),
    (
        SideKernel::Hybrid,
        SideKernel::Vq,
        false,
        false,
        &["k=uniform(b=2,g=32,axis=token,mode=hybrid); v=gain/vq(d=4,b=8,scope=group)"],
    ),
    (
        SideKernel::Polar,
        SideKernel::Hybrid,
        false,
        true,
        &[
            "k=polar(a=4,r=2,g=64); v=uniform(b=2,g=32,axis=channel,mode=hybrid)",
            "k=polar(a=3,r=2,g=32); v=gain/uniform(b=3,g=64,axis=channel,mode=hybrid)",
        ],
    ),
    (
        SideKernel::Lloyd,
        SideKernel::BitAlloc,
        false,
        true,
        &["k=rotate/lloyd(b=3); v=mean+pca/bitalloc(b=2)"],
    ),
    (
        SideKernel::BitAlloc,
        SideKernel::Uniform,
        false,
        true,
        &["k=mean+pca/bitalloc(b=2); v=uniform(b=2,axis=token)"],
    ),
    (SideKernel::F16, SideKernel::Uniform, false, true, &["k=f16; v=uniform(b=2,axis=token)"]),
    (
        SideKernel::Uniform,
        SideKernel::Fp8,
        false,
        true,
        &["k=uniform(b=2,g=32,axis=channel); v=hadamard/fp8", "k=uniform(b=3,axis=token); v=fp8"],
    ),
    // Rows as values change places within lines, so that the keys in front of them end with one.
    (
        SideKernel::Uniform,
        SideKernel::F16,
        false,
        true,
        &["k=uniform(b=2,g=32,axis=channel); v=f16", "k=uniform(b=5,axis=token); v=hadamard/f16"],
    ),
    (
        SideKernel::Polar,
        SideKernel::Bf16,
        false,
        true,
        &["k=polar(a=4,r=2,g=64); v=bf16", "k=polar(a=3,r=2,g=32); v=gain/bf16"],
    ),
    (
        SideKernel::Grid,
        SideKernel::Uniform,
        true,
        true,
        &[
            "k=mean+qpca/grid(rate=2.35)/huffman; v=uniform(b=2,axis=token)",
            "k=mean+qpca/grid(rate=2.35)/huffman; v=uniform(b=3,axis=token)/huffman",
        ],
    ),
];
