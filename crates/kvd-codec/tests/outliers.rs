//! Rows of the samples that are far beyond all others, up to a quarter of them, change no fit:
//! ordinary rows lose what they lose without them.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::{geometry, noise, page};
use kvd_codec::{BlockRows, ModelCodec, PageReader, resolve_spec};
use kvd_core::{DType, LayerIndex, Side};
use kvd_fit::{SampleKind, Samples, fit_calibration};

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
    /// Behind all rows of each kind copies of the first `of`, so that they are that share of all.
    Copies {
        of: usize,
        share: f64,
    },
    /// The first value behind all others, so that it is that share of them, under other keys.
    Value {
        share: f64,
    },
}

fn pad_rows(rows: &[f32], every: usize) -> Vec<f32> {
    let chunks = rows.chunks(every * DIM);
    chunks.flat_map(|rows| [rows, &[0.0; DIM]]).flatten().copied().collect()
}

/// As many copies as make `share` of all rows.
fn count_copies(share: f64) -> usize {
    (ROWS as f64 * share / (1.0 - share)).round() as usize
}

fn add_copies(rows: &mut Vec<f32>, of: usize, share: f64) {
    let copied = rows[..of * DIM].to_vec();
    rows.extend(copied.iter().cycle().take(count_copies(share) * DIM));
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
                    Far::Copies { of, share } => add_copies(&mut rows, of, share),
                    Far::Value { share } if kind == SampleKind::Values => {
                        add_copies(&mut rows, 1, share);
                    }
                    Far::Value { share } if kind == SampleKind::Keys => {
                        let seed = 50 + layer as usize * HEADS + head;
                        rows.extend(self::rows(seed, count_copies(share)));
                    }
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

/// Error and size of the ordinary rows of a side.
#[derive(Clone, Copy, Debug)]
struct SideCost {
    /// Relative error.
    error: f64,
    bits_per_value: f64,
}

fn costs(text: &str, far: Far) -> [SideCost; 2] {
    let (geometry, spec) = (geometry(DIM as u32, DType::F32), resolve_spec(text).unwrap());
    let calibration = fit_calibration(&geometry, &spec, &samples(far), 7, &mut |_| {}).unwrap();
    let mut codec = ModelCodec::new(geometry, spec, Some(&calibration)).unwrap();
    let values = rows(1, HEADS * TOKENS);
    let block = BlockRows { tokens: TOKENS, k: &values, v: &values };
    codec.watch_tables(LayerIndex(0), &[block]).unwrap();
    let mut bytes = Vec::new();
    let encoded = codec.encode_block(LayerIndex(0), &block, &mut bytes).unwrap();
    Side::BOTH.map(|side| {
        let (mut error, mut energy, mut len) = (0.0, 0.0, 0);
        for head in 0..HEADS {
            let of_head = page(&bytes, &encoded, side.index() * HEADS + head);
            len += of_head.len();
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
        let bits_per_value = 8.0 * len as f64 / values.len() as f64;
        SideCost { error: (error / energy).sqrt(), bits_per_value }
    })
}

#[test]
fn rows_far_beyond_all_others_change_no_fit() {
    for (number, text) in fitted_presets().enumerate() {
        let usual = costs(text, Far::None);
        let first = [0, 389, ROWS / 2, ROWS - 1][number % 4];
        let kind = [SampleKind::Keys, SampleKind::Values, SampleKind::Queries][number % 3];
        let one = Far::Rows { kind, first, count: 1, factor: 1e4 };
        for far in [one, Far::OfAll(1e4), Far::Channel(30.0)] {
            for (found, usual) in costs(text, far).iter().zip(&usual) {
                assert!(
                    found.error <= 1.1 * usual.error,
                    "{text}, {far:?}: {found:?} instead of {usual:?}"
                );
            }
        }
    }
}

/// More rows than a high percentile could tell from the others.
#[test]
fn a_share_of_long_rows_changes_no_fit() {
    let kinds = [SampleKind::Keys, SampleKind::Values, SampleKind::Queries];
    for (number, text) in fitted_presets().enumerate() {
        let usual = costs(text, Far::None);
        let (count, factor) = [(60, 30.0), (205, 30.0), (240, 1e3)][number % 3];
        let mut all = vec![(kinds[number / 3 % 3], count, factor)];
        if ["kvd-1", "kvd-2"].contains(&text) {
            all.extend(kinds.map(|kind| (kind, 60, 30.0)));
        }
        for (kind, count, factor) in all {
            let far = Far::Rows { kind, first: 100, count, factor };
            for (found, usual) in costs(text, far).iter().zip(&usual) {
                assert!(
                    found.error <= 1.1 * usual.error,
                    "{text}, {far:?}: {found:?} instead of {usual:?}"
                );
            }
        }
    }
}

fn fitted_bytes(text: &str, far: Far) -> Vec<u8> {
    let (geometry, spec) = (geometry(DIM as u32, DType::F32), resolve_spec(text).unwrap());
    fit_calibration(&geometry, &spec, &samples(far), 7, &mut |_| {}).unwrap().to_bytes()
}

/// Fits are equal byte by byte: so padding costs no bit either.
#[test]
fn rows_of_zeros_change_no_fit() {
    for (number, text) in fitted_presets().enumerate() {
        let every = [1, 3, 25][number % 3];
        let [usual, found] = [Far::None, Far::Padding { every }].map(|far| fitted_bytes(text, far));
        assert!(usual == found, "{text}: other bytes with zeros behind every {every}th row");
    }
    let set_aside = samples(Far::Padding { every: 2 }).set_aside();
    assert_eq!(set_aside.len(), 3 * LAYERS as usize);
    assert!(set_aside.iter().all(|of| of.zeros == HEADS * ROWS / 2 && of.left_out == 0));
}

/// A prompt that was sent many times, of one token or of ten.
#[test]
fn copies_of_tokens_change_no_fit() {
    for (number, text) in fitted_presets().enumerate() {
        let usual = fitted_bytes(text, Far::None);
        for share in [0.0, [0.29, 0.6, 0.9][number % 3]] {
            let far = Far::Copies { of: [1, 10][number % 2], share };
            assert!(usual == fitted_bytes(text, far), "{text}: other bytes with {far:?}");
        }
    }
    let set_aside = samples(Far::Copies { of: 10, share: 0.6 }).set_aside();
    assert_eq!(set_aside.len(), 3 * LAYERS as usize);
    assert!(set_aside.iter().all(|of| of.repeated == HEADS * count_copies(0.6) && of.zeros == 0));
}

/// Where copies are few, or only values are equal, they count for a little.
#[test]
fn some_equal_rows_cost_ordinary_ones_little() {
    for (number, text) in fitted_presets().enumerate() {
        let usual = costs(text, Far::None);
        let share = [0.29, 0.6, 0.9][number % 3];
        for far in [Far::Copies { of: 1, share: 0.06 }, Far::Value { share }] {
            for (found, usual) in costs(text, far).iter().zip(&usual) {
                let ratio = found.bits_per_value / usual.bits_per_value;
                assert!(
                    found.error <= 1.1 * usual.error && (0.9..=1.1).contains(&ratio),
                    "{text}, {far:?}: {found:?} instead of {usual:?}"
                );
            }
        }
    }
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
