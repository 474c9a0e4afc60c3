//! Values behind a rotation that have a part in common: all channels but one then have one code,
//! and whatever the kernels lose of that is added up when they are turned back
//! (`docs/adr/0066-weights-of-rotated-values-have-two-terms.md`).

use super::hostile::{ASK, SLACK, errors, errors_over};
use super::hostile_inputs::HostileInput;
use super::*;

#[test]
fn parts_that_values_share_behind_a_rotation_are_served_at_every_head_size() {
    let shared = [
        HostileInput::CommonPart(0.05),
        HostileInput::CommonPartOfSmall(0.05),
        HostileInput::CommonPartOfHalf(0.05),
        HostileInput::EqualWeights(7.0),
        HostileInput::CancellingSigns,
    ];
    let by_token =
        ["b=2", "b=4", "b=8", "b=2,g=64", "b=4,g=64", "b=2,g=32", "b=4,g=32", "b=4,g=16"];
    let by_token = by_token.map(|group| format!("k=raw; v=hadamard/uniform({group},axis=token)"));
    let others = [
        "k=raw; v=hadamard/uniform(b=4,axis=token,mode=sym)",
        "k=raw; v=hadamard/uniform(b=4,axis=block)",
        "k=raw; v=hadamard/uniform(b=5,axis=block,mode=sym)",
        "k=raw; v=hadamard/uniform(b=4,g=64,axis=channel)",
        "k=raw; v=hadamard/uniform(b=5,g=64,axis=channel,mode=sym)",
        "k=raw; v=hadamard/uniform(b=5,g=32,axis=channel,mode=hybrid)",
        "k=raw; v=hadamard/lloyd(b=4)",
        "k=raw; v=hadamard/lloyd(b=6)",
        "k=raw; v=hadamard/vq(d=2,b=4)",
        "turbo-4",
        "vecinfer-2",
        "polar-4+4",
        "oscar-2",
        "kvd-2",
        "kvd-2-fast",
    ];
    let names = by_token.into_iter().chain(others.map(String::from));
    let mut failed = Vec::new();
    for (name, dim) in names.flat_map(|name| [32, 64, 128, 256].map(|dim| (name.clone(), dim))) {
        for (kind, group) in shared.into_iter().flat_map(|kind| [(kind, 3), (kind, 8)]) {
            for (simd, out, lse) in errors(&name, dim, kind, Question { group, ..ASK }) {
                if out.max(lse) > SLACK {
                    failed.push(format!("{name}, {dim}, {kind:?}, {simd:?}: {out:.2} {lse:.2}"));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{} over the bound:\n{}", failed.len(), failed.join("\n"));
}

/// A spike in one channel is as large in all coefficients, and the transform adds their losses up.
#[test]
fn spikes_of_half_the_tokens_are_served_over_long_contexts() {
    let (mut failed, mut most) = (Vec::new(), 0f64);
    for name in [
        "k=raw; v=hadamard/uniform(b=5,axis=block,mode=sym)",
        "k=raw; v=hadamard/uniform(b=4,axis=block)",
        "k=raw; v=hadamard/uniform(b=5,g=64,axis=channel)",
        "k=raw; v=hadamard/uniform(b=5,axis=token,mode=sym)",
        "k=raw; v=hadamard/lloyd(b=6)",
        "kvd-2",
        "kvd-2-fast",
    ] {
        for (rest, group) in [(0.0, 8), (0.001, 3), (0.05, 8), (0.3, 1)] {
            let kind = HostileInput::SpikesOfHalf(rest);
            let ask = Question { position: 1023, group, ..ASK };
            for (simd, out, lse) in errors_over(&[64; 16], name, 256, kind, ask) {
                most = most.max(out);
                if out.max(lse) > SLACK {
                    failed.push(format!("{name}, {rest}, {simd:?}: {out:.2} {lse:.2}"));
                }
            }
        }
    }
    println!("at most {most:.2}");
    assert!(failed.is_empty(), "{} over the bound:\n{}", failed.len(), failed.join("\n"));
}

/// Sums that cancel leave what levels lose, where f16 loses nothing: no codec of levels may.
#[test]
fn values_that_cancel_are_served() {
    let (mut failed, mut most) = (Vec::new(), 0f64);
    for name in [
        "k=bitalloc(b=0.7); v=gain/bitalloc(b=7.4)",
        "k=raw; v=hadamard/lloyd(b=5)",
        "k=raw; v=hadamard/lloyd(b=8)",
        "k=raw; v=lloyd(b=8)",
    ] {
        for (dim, group) in [(32, 3), (64, 8), (128, 1), (256, 3)] {
            let ask = Question { group, ..ASK };
            for (simd, out, lse) in errors(name, dim, HostileInput::CancellingSigns, ask) {
                most = most.max(out);
                if out.max(lse) > SLACK {
                    failed.push(format!("{name}, {dim}, {simd:?}: {out:.2} {lse:.2}"));
                }
            }
        }
    }
    println!("at most {most:.2}");
    assert!(failed.is_empty(), "{} over the bound:\n{}", failed.len(), failed.join("\n"));
}

/// Values of every kind of quantizer that needs no calibration, with and without a rotation.
const VALUES: [&str; 12] = [
    "hadamard/uniform(b=2,axis=token)",
    "hadamard/uniform(b=4,g=32,axis=token)",
    "hadamard/uniform(b=3,g=64,axis=token,mode=sym)",
    "hadamard/uniform(b=4,axis=block)",
    "hadamard/uniform(b=5,g=64,axis=channel)",
    "hadamard/uniform(b=2,axis=token)/huffman",
    "hadamard/lloyd(b=4)",
    "uniform(b=4,g=32,axis=token)",
    "uniform(b=6,g=64,axis=channel,mode=sym)",
    "uniform(b=1,g=16,axis=token)/huffman",
    "lloyd(b=6)",
    "hadamard/fp8",
];

#[test]
fn weights_that_lose_alike_are_served_over_long_contexts() {
    let blocks = [&[64; 15][..], &[41]].concat();
    let (mut failed, mut most) = (Vec::new(), 0f64);
    for seed in 0..240u64 {
        let name = format!("k=raw; v={}", VALUES[seed as usize % VALUES.len()]);
        let ask = Question { position: 1006, group: [1, 3, 8][seed as usize % 5 % 3], ..ASK };
        let kind = HostileInput::Drawn(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        for (simd, out, lse) in errors_over(&blocks, &name, 64, kind, ask) {
            most = most.max(out);
            if out.max(lse) > SLACK {
                failed.push(format!("{name}, {seed}, {simd:?}: {out:.2} {lse:.2}"));
            }
        }
    }
    println!("at most {most:.2}");
    assert!(failed.is_empty(), "{} over the bound:\n{}", failed.len(), failed.join("\n"));
}
