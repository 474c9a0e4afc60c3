//! Pairs that tensor cores take, and pairs that go to the other kernels.

use super::*;
use crate::specialized;
use crate::unpack::{self, GroupedSide};

#[test]
fn steps_that_fit_no_query_or_weight_go_to_the_other_kernel() {
    let pair =
        KernelPair { keys: SideKernel::Uniform, values: SideKernel::Uniform, huffman: false };
    let shape = |scale_tokens, scale_channels, bits| SideShape {
        kind: SideKernel::Uniform as u32,
        dim: 128,
        bits,
        scale_tokens,
        scale_channels,
        ..SideShape::default()
    };
    let (key, value) = (shape(32, 1, 4), shape(1, 32, 4));
    assert!(fits_kernel(ChosenKernel { pair, variant: KernelVariant::Own }, &key, &value));
    // A tile of 32 tokens has two scales of a channel, a warp of 32 channels two of a token.
    for (key, value) in [
        (shape(48, 1, 4), value),
        (key, shape(1, 48, 4)),
        (shape(1, 32, 4), value),
        (key, shape(32, 1, 4)),
        (shape(32, 1, 9), value),
        (SideShape { dim: 126, ..key }, value),
        (key, SideShape { dim: 256, ..value }),
    ] {
        assert!(
            !fits_kernel(ChosenKernel { pair, variant: KernelVariant::Own }, &key, &value),
            "{key:?} {value:?}"
        );
    }
    // Pairs that multiply floats take every shape.
    let floats = KernelPair { keys: SideKernel::F32, values: SideKernel::F32, huffman: false };
    assert!(fits_kernel(
        ChosenKernel { pair: floats, variant: KernelVariant::Own },
        &shape(48, 1, 9),
        &shape(1, 48, 9)
    ));
    assert_eq!(
        work_bytes(ChosenKernel { pair: floats, variant: KernelVariant::Own }, Side::Key, &key, 4),
        0
    );
}

#[test]
fn rows_and_fp8_codes_are_halves_where_they_are_whole_steps() {
    let shape =
        |kind: SideKernel, dim| SideShape { kind: kind as u32, dim, ..SideShape::default() };
    for kind in [SideKernel::F16, SideKernel::Bf16, SideKernel::Fp8] {
        let pair = KernelPair { keys: kind, values: kind, huffman: false };
        let of = |key, value| {
            choose_variant(pair, &shape(kind, key), &shape(kind, value), LatePairs::NONE)
        };
        assert_eq!([of(128, 16), of(256, 256)], [KernelVariant::Own; 2]);
        assert_eq!([of(36, 128), of(128, 24), of(512, 64)], [KernelVariant::Any; 3]);
        assert_eq!(
            work_bytes(
                ChosenKernel { pair, variant: KernelVariant::Own },
                Side::Value,
                &shape(kind, 64),
                8
            ),
            16
        );
    }
    // Units of four rows; two or three parts of a query's channels, of rows in whole groups.
    let work = |kind, dim| {
        let pair = KernelPair { keys: kind, values: kind, huffman: false };
        work_bytes(
            ChosenKernel { pair, variant: KernelVariant::Own },
            Side::Key,
            &shape(kind, dim),
            1,
        )
    };
    assert_eq!((work(SideKernel::F16, 80), work(SideKernel::Fp8, 80)), (16 + 4 * 128, 16 + 4 * 80));
    assert_eq!(work(SideKernel::Bf16, 128), 16 + 6 * 128);
}

#[test]
fn groups_that_choose_their_mode_are_of_a_step_or_of_a_tile() {
    let pair = KernelPair { keys: SideKernel::Hybrid, values: SideKernel::Hybrid, huffman: false };
    let kind = SideKernel::Hybrid as u32;
    let shape = |scale_tokens, scale_channels, bits| {
        let shape = SideShape { kind, dim: 128, bits, scale_tokens, ..SideShape::default() };
        SideShape { scale_channels, ..shape }
    };
    let (key, value) = (shape(1, 32, 2), shape(32, 1, 7));
    assert_eq!(choose_variant(pair, &key, &value, LatePairs::NONE), KernelVariant::Own);
    for (key, value) in [
        (shape(1, 16, 2), value),
        (shape(32, 1, 2), value),
        (shape(1, 64, 8), value),
        (key, shape(16, 1, 2)),
        (key, shape(1, 32, 2)),
    ] {
        assert_eq!(
            choose_variant(pair, &key, &value, LatePairs::NONE),
            KernelVariant::Any,
            "{key:?} {value:?}"
        );
    }
    // Four steps of digits and sums; what a row adds up to.
    let work = |side, shape| {
        work_bytes(ChosenKernel { pair, variant: KernelVariant::Own }, side, shape, 4)
    };
    let digits = 4 * (4 * 5 + 4 * 4 * 24 + 4 * 4);
    assert_eq!(work(Side::Key, &key), digits);
    assert_eq!(work(Side::Value, &value), 4 * 4 * 128);
    assert_eq!(tiles_together(ChosenKernel { pair, variant: KernelVariant::Own }, 8), 2);
}

#[test]
fn bit_allocations_of_too_many_bytes_go_to_the_other_kernel() {
    let pair =
        KernelPair { keys: SideKernel::BitAlloc, values: SideKernel::BitAlloc, huffman: false };
    let kind = SideKernel::BitAlloc as u32;
    let [key, value] = Side::BOTH.map(|side| SideShape {
        kind,
        dim: 128,
        bits: 256,
        ..unpack::expected_unpack(GroupedSide { side, grouped: false }, 128)
    });
    assert_eq!(choose_variant(pair, &key, &value, LatePairs::NONE), KernelVariant::Own);
    let wide = SideShape {
        kind,
        dim: 192,
        ..unpack::expected_unpack(GroupedSide { side: Side::Value, grouped: false }, 192)
    };
    assert_eq!(
        choose_variant(pair, &key, &wide, LatePairs::NONE),
        KernelVariant::Any,
        "too many sums"
    );
    // Five steps of digits, and the tile of bytes.
    let work = |side, shape| {
        work_bytes(ChosenKernel { pair, variant: KernelVariant::Own }, side, shape, 4)
    };
    assert_eq!(work(Side::Key, &key), 4 * (4 * 5 + 5 * 4 * 24) + 32 * 160);
    assert_eq!(work(Side::Value, &value), 4 * 4 * 128 + 8 * 136 + 128 + 4 * (7 * 136 + 160));
    assert_eq!(
        work_bytes(ChosenKernel { pair, variant: KernelVariant::Any }, Side::Key, &key, 4),
        0
    );
    // In groups, where pages are two tiles: a step more for odd runs, no bytes.
    let grouped = |side, dim| {
        let shape = unpack::expected_unpack(GroupedSide { side, grouped: true }, dim);
        SideShape { kind, dim: dim as u32, ..shape }
    };
    let [in_groups, values] = Side::BOTH.map(|side| grouped(side, 128));
    assert_eq!(choose_variant(pair, &in_groups, &values, LatePairs::NONE), KernelVariant::Groups);
    assert_eq!(
        choose_variant(pair, &in_groups, &value, LatePairs::NONE),
        KernelVariant::Any,
        "one side alone"
    );
    assert_eq!(tiles_together(ChosenKernel { pair, variant: KernelVariant::Groups }, 4), 2);
    let work = |side, shape| {
        work_bytes(ChosenKernel { pair, variant: KernelVariant::Groups }, side, shape, 4)
    };
    assert_eq!(work(Side::Key, &in_groups), 4 * (4 * 5 + 5 * 4 * 24));
    assert_eq!(work(Side::Value, &values), 4 * 4 * 128 + 8 * 128 + 128);
    let fixed = |key, value| {
        specialized::specialized_kernel(
            ChosenKernel { pair, variant: KernelVariant::Groups },
            4,
            key,
            value,
        )
    };
    assert_eq!(fixed(&in_groups, &values), Some("kvd_attend_kvd2fast_4"));
    let twice = SideShape { spread_places: 192, ..values };
    assert_eq!(fixed(&in_groups, &twice), None, "levels of two bytes");
    assert_eq!(
        specialized::specialized_kernel(
            ChosenKernel { pair, variant: KernelVariant::Own },
            4,
            &key,
            &value
        ),
        None
    );
}

#[test]
fn codebooks_off_whole_levels_have_a_kernel_that_multiplies_floats() {
    let pair = KernelPair { keys: SideKernel::Vq, values: SideKernel::Vq, huffman: false };
    let bytes = SideShape { dim: 128, bits: 8, sets: 1, entry_bytes: 4, ..SideShape::default() };
    let bytes = SideShape { kind: SideKernel::Vq as u32, book_dim: 4, ..bytes };
    assert_eq!(choose_variant(pair, &bytes, &bytes, LatePairs::NONE), KernelVariant::Own);
    assert!(
        Side::BOTH
            .iter()
            .all(|side| looks_up(ChosenKernel { pair, variant: KernelVariant::Own }, *side))
    );
    let floats = SideShape { entry_bytes: 0, ..bytes };
    assert_eq!(choose_variant(pair, &bytes, &floats, LatePairs::NONE), KernelVariant::Floats);
    assert!(
        !Side::BOTH
            .iter()
            .any(|side| looks_up(ChosenKernel { pair, variant: KernelVariant::Floats }, *side))
    );
    let wide = SideShape { dim: 192, ..bytes };
    assert_eq!(choose_variant(pair, &wide, &bytes, LatePairs::NONE), KernelVariant::Own);
    assert_eq!(
        choose_variant(pair, &bytes, &wide, LatePairs::NONE),
        KernelVariant::Floats,
        "too many sums"
    );
    let huffman = KernelPair { huffman: true, ..pair };
    assert_eq!(choose_variant(huffman, &bytes, &bytes, LatePairs::NONE), KernelVariant::Any);
    // Sixteen channels of eight codes: lanes without a code have steps nonetheless.
    let work = |shape| {
        work_bytes(ChosenKernel { pair, variant: KernelVariant::Own }, Side::Key, &shape, 4)
    };
    assert_eq!(work(bytes), 4 * (4 * 5 + 4 * 4 * 24));
    assert_eq!(
        work_bytes(ChosenKernel { pair, variant: KernelVariant::Own }, Side::Value, &bytes, 4),
        4 * 4 * 128
    );
}
