//! Conformance of the kernels: every preset × head size × query heads per KV head × tails answers
//! as f64 attention over the decoded pages does, in the kernel that is meant for it. A test per
//! preset, so that they run side by side.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::compare::kernel;
use common::levels::off_levels;
use common::reference::{check, expected};
use common::run::{kernels, run_with};
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_codec::Calibration;
use kvd_core::{DType, Geometry, Side};
use kvd_emu::{ThreadOrder, is_available, is_sanitized};

/// Roughly normal rows, one channel larger than the others, some values far shorter.
fn value(large: f32) -> impl Fn(Side, usize, usize, usize) -> f32 {
    move |side, head, token, channel| {
        let index = ((side.index() * 2 + head) * 4096 + token) * 512 + channel;
        let length = if side == Side::Value {
            [1.0, 1.0, 0.25, 1.0, 1.0, 1.0 / 32.0, 1.0][token % 7]
        } else {
            1.0
        };
        noise(index) * length * if channel == 3 { large } else { 1.0 }
    }
}

/// Head sizes, and tokens of pages and of the window behind them.
type Shapes = (&'static [u32], &'static [(&'static [usize], usize)]);

const SHAPES: Shapes =
    (&[64, 128], &[(&[64, 64], 7), (&[96, 33], 0), (&[64, 33], 3), (&[1], 1), (&[31], 0)]);

/// Those for ThreadSanitizer: a race shows in any, and all take too long for every run. Kernels
/// with constant shapes are for 128 channels.
const WATCHED: Shapes = (&[128], &[(&[64, 33], 3)]);

/// Shared memory for codebooks: all of them, some entries of large ones, none.
const TABLE_BYTES: [usize; 3] = [1 << 20, 3000, 0];

/// The kernel of a preset's pages, where `pair` and `fixed` are for heads whose codebooks stand in
/// shared memory.
fn wanted(
    (pair, fixed): (&str, Option<&str>),
    (dim, rows): (usize, usize),
    (block_tokens, table_bytes): (u32, usize),
) -> String {
    match (pair, fixed) {
        // Groups are for pages of two tiles.
        ("groups_groups", _) if block_tokens != 64 => {
            kernel("bitalloc_bitalloc", None, (dim, rows))
        }
        // Only sixteen entries are in registers.
        ("vq_vq", Some("vecinfer4" | "vecinfer2")) if table_bytes == 0 => {
            kernel(pair, None, (dim, rows))
        }
        _ => kernel(pair, fixed, (dim, rows)),
    }
}

fn conforms(name: &str, kernels: (&str, Option<&str>)) {
    conforms_with(name, kernels, Calibration::clone);
}

/// Checks a preset with the calibration that `change` makes.
fn conforms_with(
    name: &str,
    (pair, fixed): (&str, Option<&str>),
    change: fn(&Calibration) -> Calibration,
) {
    if !is_available() {
        return;
    }
    // Larger radii than the calibration's would fall back to another codec.
    let value = value(if name == "polar-4+4" { 1.0 } else { 8.0 });
    let (dims, tails) = if is_sanitized("thread") { WATCHED } else { SHAPES };
    // Orders of threads, splits and codebook caches take turns: each meets each shape class.
    let mut turn = 0;
    for &dim in dims {
        for &(pages, window) in tails {
            // Kernels read some sides differently in pages of two tiles.
            let block_tokens = if pages[0] > 64 { 96 } else { 64 };
            let geometry = Geometry { block_tokens, ..geometry(dim, dim, DType::F16) };
            let layout = Layout { pages: pages.to_vec(), window };
            let stored = Stored::calibrated(&geometry, name, &layout, &value, change);
            for (group, rows) in [1, 4, 8].into_iter().enumerate() {
                let ask = Ask::last(rows, stored.tokens);
                let plan = ask.plan(&stored, |i| 2.0 * noise(77_777 + i));
                let parts_per_unit = [1, 100, 2][(turn + group) % 3];
                let order = ThreadOrder::EACH[(turn / 3 + group) % 3];
                let table_bytes = TABLE_BYTES[(turn + 2 * group) % 3];
                let answer = run_with(&stored, &plan, parts_per_unit, table_bytes, order).unwrap();
                let what = format!("{name}, {dim} channels, {layout:?}, {rows} heads, {order:?}");
                check(&answer, &expected(&stored, &plan), &what);
                // Windows are rows as they came.
                let mut ran = kernels();
                ran.retain(|name| pair == "f16_f16" || !name.starts_with("kvd_attend_f16_f16"));
                let of_room = (block_tokens, table_bytes);
                assert_eq!(ran, [wanted((pair, fixed), (dim as usize, rows), of_room)], "{what}");
            }
            turn += 1;
        }
    }
}

macro_rules! presets {
    ($($test:ident $name:literal $pair:literal $fixed:expr,)*) => {
        $(#[test]
        fn $test() {
            conforms($name, ($pair, $fixed));
        })*

        #[test]
        fn every_preset_has_a_test() {
            let tested = [$($name),*];
            for preset in kvd_codec::presets() {
                assert!(tested.contains(&preset.name), "{}", preset.name);
            }
        }
    };
}

// Which kernel reads its pages, and which one that has its shapes as constants.
presets! {
    raw "raw" "f16_f16" None,
    fp8 "fp8" "fp8_fp8" None,
    kivi_4 "kivi-4" "uniform_uniform" Some("kivi4"),
    kivi_2 "kivi-2" "uniform_uniform" Some("kivi2"),
    kvcomp "kvcomp" "huffman_uniform_uniform" None,
    kvcomp_channel "kvcomp-channel" "huffman_uniform_uniform" None,
    vecinfer_4 "vecinfer-4" "vq_vq" Some("vecinfer4"),
    vecinfer_3 "vecinfer-3" "vq_vq" None,
    vecinfer_2 "vecinfer-2" "vq_vq" Some("vecinfer2"),
    vecinfer_2_reg "vecinfer-2-reg" "vq_vq" Some("vecinfer2reg"),
    vecinfer_1_5 "vecinfer-1.5" "vq_vq" None,
    vecinfer_1_25 "vecinfer-1.25" "vq_vq" None,
    cq_4 "cq-4" "vq_vq" None,
    cq_2 "cq-2" "vq_vq" None,
    vq_residual_4 "vq-residual-4" "vqfloat_vqfloat" None,
    innerq_2 "innerq-2" "hybrid_hybrid" Some("innerq2"),
    polar_4_4 "polar-4+4" "polar_uniform" Some("polar44"),
    polar_4_2 "polar-4+2" "polar_uniform" None,
    turbo_4 "turbo-4" "lloyd_uniform" Some("turbo4"),
    turbo_3 "turbo-3" "lloyd_uniform" None,
    oscar_2 "oscar-2" "uniform_uniform" None,
    kvd_4 "kvd-4" "huffman_grid_grid" None,
    kvd_3 "kvd-3" "huffman_grid_grid" None,
    kvd_2 "kvd-2" "huffman_grid_grid" None,
    kvd_1_5 "kvd-1.5" "huffman_grid_grid" None,
    kvd_1 "kvd-1" "huffman_grid_grid" None,
    kvd_2_fast "kvd-2-fast" "groups_groups" Some("kvd2fast"),
}

// Fits leave codebooks of one stage on whole levels. Those of others may be off them.
#[test]
fn codebooks_off_whole_levels_are_multiplied_as_floats() {
    for name in ["vecinfer-3", "vecinfer-1.5", "vecinfer-1.25", "vecinfer-2"] {
        conforms_with(name, ("vqfloat_vqfloat", None), off_levels);
    }
}
