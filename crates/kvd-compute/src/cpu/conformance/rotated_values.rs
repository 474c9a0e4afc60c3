//! Values behind a rotation that have a part in common: all channels but one then have one code,
//! and whatever the kernels lose of that is added up when they are turned back
//! (`docs/adr/0066-weights-of-rotated-values-have-two-terms.md`).

use super::hostile::{ASK, SLACK, errors};
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
        "k=raw; v=hadamard/uniform(b=4,g=64,axis=channel)",
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

/// Where f16 has the weights exactly and values cancel, levels on two bytes are over the bound.
#[test]
fn values_that_cancel_err_up_to_twelve_times() {
    let name = "k=bitalloc(b=0.7); v=gain/bitalloc(b=7.4)";
    for (simd, out, lse) in errors(name, 64, HostileInput::CancellingSigns, ASK) {
        assert!(out <= 12.0 && lse <= SLACK, "{simd:?}: {out:.2} {lse:.2}");
    }
}
