//! Codecs that were fitted, and whose Huffman tables were built, on rows of another kind: symbols
//! that the tables lack, offsets that cancel what coefficients sum up, gains that differ by row.

use super::hostile::{ASK, SLACK, errors_of_codec};
use super::hostile_inputs::HostileInput;
use super::*;
use kvd_codec::BlockRows;

const NAMES: [&str; 8] = [
    "k=raw; v=mean+hadamard/grid(rate=1)/huffman",
    "k=raw; v=sveig+gain/grid(rate=1)/huffman",
    "k=raw; v=mean+gain/bitalloc(b=2.5)",
    "kvd-3",
    "kvd-2",
    "kvd-1.5",
    "kvd-1",
    "kvd-2-fast",
];

/// Rows of which the first channel is so many times the root of `dim`, in turns; others are noise.
fn spike_rows(dim: usize, sizes: [f32; 2]) -> Vec<f32> {
    let mut rows = values(512 * dim, 77);
    for (index, row) in rows.chunks_exact_mut(dim).enumerate() {
        row.iter_mut().for_each(|x| *x *= 0.001);
        row[0] += sizes[index % 2] * (dim as f32).sqrt();
    }
    rows
}

#[test]
fn rows_of_another_kind_than_was_fitted_on_are_served() {
    let kinds = [
        HostileInput::SignedSpikes,
        HostileInput::CommonPartOfHalf(0.0),
        HostileInput::SpikesOfHalf(0.05),
        HostileInput::EqualWeights(7.0),
    ];
    let (mut failed, mut most) = (Vec::new(), 0f64);
    for (name, dim) in NAMES.into_iter().flat_map(|name| [32, 64, 128].map(|dim| (name, dim))) {
        for sizes in [[1.0, 1.0], [-1.0, 1.0], [0.0, 1.0]] {
            let geometry = geometry(dim);
            let spec = kvd_codec::resolve_spec(name).unwrap();
            let keys = values(512 * dim as usize, 77);
            let calibration = fitted_on(&geometry, &spec, [keys, spike_rows(dim as usize, sizes)]);
            let mut codec = ModelCodec::new(geometry, spec, Some(&calibration)).unwrap();
            let alike = |rows: Vec<f32>| rows[..64 * dim as usize].repeat(HEADS);
            let (k, v) =
                (alike(values(64 * dim as usize, 77)), alike(spike_rows(dim as usize, sizes)));
            codec.train_tables(LAYER, &[BlockRows { tokens: 64, k: &k, v: &v }]).unwrap();
            for kind in kinds {
                let ask = Question { position: 511, ..ASK };
                for (simd, out, lse) in errors_of_codec(codec.clone(), &[64; 8], kind, ask) {
                    most = most.max(out);
                    if out.max(lse) > SLACK {
                        let context = format!("{name}, {dim}, {sizes:?}, {kind:?}, {simd:?}");
                        failed.push(format!("{context}: {out:.2} {lse:.2}"));
                    }
                }
            }
        }
    }
    println!("at most {most:.2}");
    assert!(failed.is_empty(), "{} over the bound:\n{}", failed.len(), failed.join("\n"));
}
