//! Conformance of the kernels: every preset × head size × query heads per KV head × tails answers
//! as f64 attention over the decoded pages does. A test per preset, so that they run side by side.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod common;

use common::reference::{check, expected};
use common::run::run_with;
use common::{Ask, Layout, Stored, geometry, noise};
use kvd_core::{DType, Geometry, Side};
use kvd_emu::{Order, available};

/// Roughly normal rows, one channel much larger than the others, some values far shorter.
fn value(side: Side, head: usize, token: usize, channel: usize) -> f32 {
    let index = ((side.index() * 2 + head) * 4096 + token) * 512 + channel;
    let length = if side == Side::Value {
        [1.0, 1.0, 0.25, 1.0, 1.0, 1.0 / 32.0, 1.0][token % 7]
    } else {
        1.0
    };
    noise(index) * length * if channel == 3 { 8.0 } else { 1.0 }
}

/// Shared memory for codebooks: all of them, some entries, none.
const TABLE_BYTES: [usize; 3] = [1 << 20, 3000, 0];

fn conforms(name: &str) {
    if !available() {
        return;
    }
    // Orders of threads, splits and codebook caches take turns: each meets each shape class.
    let mut turn = 0;
    for dim in [64, 128] {
        let tails = [(&[64, 64][..], 7), (&[96, 33], 0), (&[64, 33], 3), (&[1], 1), (&[31], 0)];
        for (pages, window) in tails {
            // Of pages of two tiles some sides are read in another way.
            let block_tokens = if pages[0] > 64 { 96 } else { 64 };
            let geometry = Geometry { block_tokens, ..geometry(dim, dim, DType::F16) };
            let layout = Layout { pages: pages.to_vec(), window };
            let stored = Stored::new(&geometry, name, &layout, value);
            for group in [1, 4, 8] {
                let ask = Ask::last(group, stored.tokens);
                let plan = ask.plan(&stored, |i| 2.0 * noise(77_777 + i));
                let (parts_per_unit, order) = ([1, 100, 2][turn % 3], Order::EACH[turn / 2 % 3]);
                let table_bytes = TABLE_BYTES[turn % 3];
                turn += 1;
                let answer = run_with(&stored, &plan, parts_per_unit, table_bytes, order).unwrap();
                let what = format!("{name}, {dim} channels, {layout:?}, {group} heads, {order:?}");
                check(&answer, &expected(&stored, &plan), &what);
            }
        }
    }
}

macro_rules! presets {
    ($($test:ident $name:literal,)*) => {
        $(#[test]
        fn $test() {
            conforms($name);
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

presets! {
    raw "raw",
    fp8 "fp8",
    kivi_4 "kivi-4",
    kivi_2 "kivi-2",
    kvcomp "kvcomp",
    kvcomp_channel "kvcomp-channel",
    vecinfer_4 "vecinfer-4",
    vecinfer_3 "vecinfer-3",
    vecinfer_2 "vecinfer-2",
    vecinfer_2_reg "vecinfer-2-reg",
    vecinfer_1_5 "vecinfer-1.5",
    vecinfer_1_25 "vecinfer-1.25",
    cq_4 "cq-4",
    cq_2 "cq-2",
    vq_residual_4 "vq-residual-4",
    innerq_2 "innerq-2",
    polar_4_4 "polar-4+4",
    polar_4_2 "polar-4+2",
    turbo_4 "turbo-4",
    turbo_3 "turbo-3",
    kvd_4 "kvd-4",
    kvd_3 "kvd-3",
    kvd_2 "kvd-2",
    kvd_1_5 "kvd-1.5",
    kvd_2_fast "kvd-2-fast",
}
