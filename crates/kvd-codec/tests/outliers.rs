//! A few rows of the samples that are far beyond all others change no fit: ordinary rows lose what
//! they lose without them.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{geometry, noise, page};
use kvd_codec::{
    BlockRows, ModelCodec, PageReader, SampleKind, Samples, fit_calibration, resolve_spec,
};
use kvd_core::{DType, LayerIndex, Side};

const DIM: usize = 64;
const HEADS: usize = 2;
const LAYERS: u32 = 2;
const ROWS: usize = 1024;
const TOKENS: usize = 64;

/// Every preset that is fitted.
fn fitted_presets() -> impl Iterator<Item = &'static str> {
    let names = kvd_codec::presets().iter().map(|preset| preset.name);
    names.filter(|name| resolve_spec(name).unwrap().needs_calibration())
}

/// Rows near a normal distribution.
fn rows(seed: usize, count: usize) -> Vec<f32> {
    (0..count * DIM).map(|i| noise((seed << 24) + i)).collect()
}

/// Which of a head's rows are far beyond the others.
#[derive(Clone, Copy, Debug)]
enum Far {
    None,
    /// Rows of a kind, times a factor.
    Rows {
        kind: SampleKind,
        first: usize,
        count: usize,
        factor: f32,
    },
    /// Ten rows of each kind, times a factor.
    OfAll(f32),
    /// One channel of one row of each kind.
    Channel(f32),
    /// Zeros behind every `every`th row, as many rows more: padding.
    Padding {
        every: usize,
    },
}

fn pad_rows(rows: &[f32], every: usize) -> Vec<f32> {
    let chunks = rows.chunks(every * DIM);
    chunks.flat_map(|rows| [rows, &[0.0; DIM]]).flatten().copied().collect()
}

fn samples(far: Far) -> Samples {
    let mut samples = Samples::new(&geometry(DIM as u32, DType::F32));
    for layer in 0..LAYERS {
        for head in 0..HEADS {
            let of_kind = |index: usize, kind: SampleKind| {
                let mut rows = rows(10 + (layer as usize * HEADS + head) * 3 + index, ROWS);
                match far {
                    Far::Rows { kind: of, first, count, factor } if of == kind => {
                        let far = &mut rows[first * DIM..(first + count) * DIM];
                        far.iter_mut().for_each(|x| *x *= factor);
                    }
                    Far::OfAll(factor) => {
                        rows[..10 * DIM].iter_mut().for_each(|x| *x *= factor);
                    }
                    Far::Channel(factor) => rows[9] *= factor,
                    Far::Padding { every } => rows = pad_rows(&rows, every),
                    _ => {}
                }
                rows
            };
            let (layer, queries) = (LayerIndex(layer), of_kind(2, SampleKind::Queries));
            samples.push_queries(layer, head, &queries).unwrap();
            samples.push(layer, Side::Key, head, &of_kind(0, SampleKind::Keys)).unwrap();
            samples.push(layer, Side::Value, head, &of_kind(1, SampleKind::Values)).unwrap();
        }
    }
    samples
}

/// Relative errors of ordinary keys and values.
fn errors(text: &str, far: Far) -> [f64; 2] {
    let (geometry, spec) = (geometry(DIM as u32, DType::F32), resolve_spec(text).unwrap());
    let calibration = fit_calibration(&geometry, &spec, &samples(far), 7, &mut |_| {}).unwrap();
    let mut codec = ModelCodec::new(geometry, spec, Some(&calibration)).unwrap();
    let values = rows(1, HEADS * TOKENS);
    let block = BlockRows { tokens: TOKENS, k: &values, v: &values };
    codec.watch_tables(LayerIndex(0), &[block]).unwrap();
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LayerIndex(0), &block, &mut bytes).unwrap();
    Side::BOTH.map(|side| {
        let (mut error, mut energy) = (0.0, 0.0);
        for head in 0..HEADS {
            let of_head = page(&bytes, &encoded, side.index() * HEADS + head);
            let reader = PageReader::open_page(&codec, LayerIndex(0), side, head, of_head).unwrap();
            let mut coefficients = vec![0f32; TOKENS * DIM];
            reader.decode_rows(0, TOKENS, &mut coefficients).unwrap();
            let wanted = values[head * TOKENS * DIM..].chunks_exact(DIM);
            for (coefficients, row) in coefficients.chunks_exact(DIM).zip(wanted) {
                let mut back = vec![0f32; DIM];
                codec.head_codec(LayerIndex(0), side, head).invert_row(coefficients, &mut back);
                let pairs = || back.iter().zip(row).map(|(a, b)| [f64::from(*a), f64::from(*b)]);
                error += pairs().map(|[a, b]| (a - b).powi(2)).sum::<f64>();
                energy += pairs().map(|[_, b]| b * b).sum::<f64>();
            }
        }
        (error / energy).sqrt()
    })
}

#[test]
fn rows_far_beyond_all_others_change_no_fit() {
    for (number, text) in fitted_presets().enumerate() {
        let usual = errors(text, Far::None);
        let first = [0, 389, ROWS / 2, ROWS - 1][number % 4];
        let kind = [SampleKind::Keys, SampleKind::Values, SampleKind::Queries][number % 3];
        let one = Far::Rows { kind, first, count: 1, factor: 1e4 };
        for far in [one, Far::OfAll(1e4), Far::Channel(30.0)] {
            let found = errors(text, far);
            for (found, usual) in found.into_iter().zip(usual) {
                assert!(found <= 1.1 * usual, "{text}, {far:?}: {found} instead of {usual}");
            }
        }
    }
}

/// Fits are equal byte by byte: so padding costs no bit either.
#[test]
fn rows_of_zeros_change_no_fit() {
    for (number, text) in fitted_presets().enumerate() {
        let every = [1, 3, 25][number % 3];
        let [usual, found] = [Far::None, Far::Padding { every }].map(|far| {
            let (geometry, spec) = (geometry(DIM as u32, DType::F32), resolve_spec(text).unwrap());
            fit_calibration(&geometry, &spec, &samples(far), 7, &mut |_| {}).unwrap().to_bytes()
        });
        assert!(usual == found, "{text}: other bytes with zeros behind every {every}th row");
    }
    let set_aside = samples(Far::Padding { every: 2 }).set_aside();
    assert_eq!(set_aside.len(), 3 * LAYERS as usize);
    assert!(set_aside.iter().all(|of| of.zeros == HEADS * ROWS / 2 && of.left_out == 0));
}

#[test]
fn samples_say_what_they_set_aside() {
    assert!(samples(Far::None).set_aside().is_empty());
    let found = samples(Far::Rows { kind: SampleKind::Values, first: 17, count: 2, factor: 300.0 })
        .set_aside();
    assert_eq!(found.len(), LAYERS as usize);
    let of_layer = found[1];
    assert_eq!((of_layer.layer, of_layer.kind), (LayerIndex(1), SampleKind::Values));
    assert_eq!((of_layer.rows, of_layer.left_out), (HEADS * ROWS, 2 * HEADS));
    assert!((200.0..400.0).contains(&of_layer.longest), "{}", of_layer.longest);
}
