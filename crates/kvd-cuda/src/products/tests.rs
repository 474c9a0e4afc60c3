//! What tensor cores take, and what goes to the other kernels.

use super::*;
use crate::fixed;
use crate::spread;

#[test]
fn steps_that_fit_no_query_or_weight_go_to_the_other_kernel() {
    let pair = Pair { keys: Kernel::Uniform, values: Kernel::Uniform, huffman: false };
    let shape = |scale_tokens, scale_channels, bits| SideShape {
        kind: Kernel::Uniform as u32,
        dim: 128,
        bits,
        scale_tokens,
        scale_channels,
        ..SideShape::default()
    };
    let (key, value) = (shape(32, 1, 4), shape(1, 32, 4));
    assert!(fits((pair, Variant::Own), &key, &value));
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
        assert!(!fits((pair, Variant::Own), &key, &value), "{key:?} {value:?}");
    }
    // Pairs that multiply floats take every shape.
    let floats = Pair { keys: Kernel::F32, values: Kernel::F32, huffman: false };
    assert!(fits((floats, Variant::Own), &shape(48, 1, 9), &shape(1, 48, 9)));
    assert_eq!(work_bytes((floats, Variant::Own), Side::Key, &key, 4), 0);
}

#[test]
fn rows_and_fp8_codes_are_halves_where_they_are_whole_steps() {
    let shape = |kind: Kernel, dim| SideShape { kind: kind as u32, dim, ..SideShape::default() };
    for kind in [Kernel::F16, Kernel::Bf16, Kernel::Fp8] {
        let pair = Pair { keys: kind, values: kind, huffman: false };
        let of =
            |key, value| variant(pair, &shape(kind, key), &shape(kind, value), LatePairs::NONE);
        assert_eq!([of(128, 16), of(256, 256)], [Variant::Own; 2]);
        assert_eq!([of(36, 128), of(128, 24), of(512, 64)], [Variant::Any; 3]);
        assert_eq!(work_bytes((pair, Variant::Own), Side::Value, &shape(kind, 64), 8), 16);
    }
    // Units of four rows; two or three parts of a query's channels, of rows in whole groups.
    let work = |kind, dim| {
        let pair = Pair { keys: kind, values: kind, huffman: false };
        work_bytes((pair, Variant::Own), Side::Key, &shape(kind, dim), 1)
    };
    assert_eq!((work(Kernel::F16, 80), work(Kernel::Fp8, 80)), (16 + 4 * 128, 16 + 4 * 80));
    assert_eq!(work(Kernel::Bf16, 128), 16 + 6 * 128);
}

#[test]
fn groups_that_choose_their_mode_are_of_a_step_or_of_a_tile() {
    let pair = Pair { keys: Kernel::Hybrid, values: Kernel::Hybrid, huffman: false };
    let kind = Kernel::Hybrid as u32;
    let shape = |scale_tokens, scale_channels, bits| {
        let shape = SideShape { kind, dim: 128, bits, scale_tokens, ..SideShape::default() };
        SideShape { scale_channels, ..shape }
    };
    let (key, value) = (shape(1, 32, 2), shape(32, 1, 7));
    assert_eq!(variant(pair, &key, &value, LatePairs::NONE), Variant::Own);
    for (key, value) in [
        (shape(1, 16, 2), value),
        (shape(32, 1, 2), value),
        (shape(1, 64, 8), value),
        (key, shape(16, 1, 2)),
        (key, shape(1, 32, 2)),
    ] {
        assert_eq!(variant(pair, &key, &value, LatePairs::NONE), Variant::Any, "{key:?} {value:?}");
    }
    // Four steps of digits and sums; what a row adds up to.
    let work = |side, shape| work_bytes((pair, Variant::Own), side, shape, 4);
    let digits = 4 * (4 * 5 + 4 * 4 * 24 + 4 * 4);
    assert_eq!(work(Side::Key, &key), digits);
    assert_eq!(work(Side::Value, &value), 4 * 4 * 128);
    assert_eq!(tiles_together((pair, Variant::Own), 8), 2);
}

#[test]
fn bit_allocations_of_too_many_bytes_go_to_the_other_kernel() {
    let pair = Pair { keys: Kernel::BitAlloc, values: Kernel::BitAlloc, huffman: false };
    let kind = Kernel::BitAlloc as u32;
    let [key, value] = Side::BOTH.map(|side| SideShape {
        kind,
        dim: 128,
        bits: 256,
        ..spread::expected((side, false), 128)
    });
    assert_eq!(variant(pair, &key, &value, LatePairs::NONE), Variant::Own);
    let wide = SideShape { kind, dim: 192, ..spread::expected((Side::Value, false), 192) };
    assert_eq!(variant(pair, &key, &wide, LatePairs::NONE), Variant::Any, "too many sums");
    // Five steps of digits, and the tile of bytes.
    let work = |side, shape| work_bytes((pair, Variant::Own), side, shape, 4);
    assert_eq!(work(Side::Key, &key), 4 * (4 * 5 + 5 * 4 * 24) + 32 * 160);
    assert_eq!(work(Side::Value, &value), 4 * 4 * 128 + 8 * 136 + 128 + 4 * (7 * 136 + 160));
    assert_eq!(work_bytes((pair, Variant::Any), Side::Key, &key, 4), 0);
    // In groups, where pages are two tiles: a step more for odd runs, no bytes.
    let grouped = |side, dim| {
        let shape = spread::expected((side, true), dim);
        SideShape { kind, dim: dim as u32, ..shape }
    };
    let [in_groups, values] = Side::BOTH.map(|side| grouped(side, 128));
    assert_eq!(variant(pair, &in_groups, &values, LatePairs::NONE), Variant::Groups);
    assert_eq!(variant(pair, &in_groups, &value, LatePairs::NONE), Variant::Any, "one side alone");
    assert_eq!(tiles_together((pair, Variant::Groups), 4), 2);
    let work = |side, shape| work_bytes((pair, Variant::Groups), side, shape, 4);
    assert_eq!(work(Side::Key, &in_groups), 4 * (4 * 5 + 5 * 4 * 24));
    assert_eq!(work(Side::Value, &values), 4 * 4 * 128 + 8 * 128 + 128);
    let fixed = |key, value| fixed::kernel((pair, Variant::Groups), 4, key, value);
    assert_eq!(fixed(&in_groups, &values), Some("kvd_attend_kvd2fast_4"));
    let twice = SideShape { spread_places: 192, ..values };
    assert_eq!(fixed(&in_groups, &twice), None, "levels of two bytes");
    assert_eq!(fixed::kernel((pair, Variant::Own), 4, &key, &value), None);
}

#[test]
fn codebooks_off_whole_levels_have_a_kernel_that_multiplies_floats() {
    let pair = Pair { keys: Kernel::Vq, values: Kernel::Vq, huffman: false };
    let bytes = SideShape { dim: 128, bits: 8, sets: 1, entry_bytes: 4, ..SideShape::default() };
    let bytes = SideShape { kind: Kernel::Vq as u32, book_dim: 4, ..bytes };
    assert_eq!(variant(pair, &bytes, &bytes, LatePairs::NONE), Variant::Own);
    assert!(Side::BOTH.iter().all(|side| looks_up((pair, Variant::Own), *side)));
    let floats = SideShape { entry_bytes: 0, ..bytes };
    assert_eq!(variant(pair, &bytes, &floats, LatePairs::NONE), Variant::Floats);
    assert!(!Side::BOTH.iter().any(|side| looks_up((pair, Variant::Floats), *side)));
    let wide = SideShape { dim: 192, ..bytes };
    assert_eq!(variant(pair, &wide, &bytes, LatePairs::NONE), Variant::Own);
    assert_eq!(variant(pair, &bytes, &wide, LatePairs::NONE), Variant::Floats, "too many sums");
    let huffman = Pair { huffman: true, ..pair };
    assert_eq!(variant(huffman, &bytes, &bytes, LatePairs::NONE), Variant::Any);
    // Sixteen channels of eight codes: lanes without a code have steps nonetheless.
    let work = |shape| work_bytes((pair, Variant::Own), Side::Key, &shape, 4);
    assert_eq!(work(bytes), 4 * (4 * 5 + 4 * 4 * 24));
    assert_eq!(work_bytes((pair, Variant::Own), Side::Value, &bytes, 4), 4 * 4 * 128);
}
