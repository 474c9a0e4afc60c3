//! Head sizes and blocks of every shape, and which of them have kernels.

use super::*;
use crate::cpu::huffman::StreamTiles;

/// Codecs of every kind of page and kernel.
const SHAPED: &[&str] = &[
    "raw",
    "fp8",
    "kivi-4",
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "vecinfer-2",
    "kvd-2-fast",
    "innerq-2",
    "turbo-4",
    "polar-4+4",
    "kvcomp",
    "kvcomp-channel",
    "kvd-4",
    "kvd-2",
];

#[test]
fn head_sizes_that_fill_no_register_are_right_too() {
    let ask = Question { group: 3, n_q: 1, position: 175, window: None, cap: None };
    for dim in [80, 96, 128, 136, 256] {
        for name in SHAPED {
            // Of 80 channels the last group has 16; of 136 it has 8, and values are decoded.
            check(&geometry(dim), name, InputKind::Normal, &[ask]);
        }
    }
}

/// Whether keys and values of a codec are multiplied without being decoded.
fn kernels(codec: &ModelCodec, simd: Simd) -> [bool; 2] {
    let [k, v] = Side::BOTH.map(|side| codec.head_codec(LAYER, side, 0));
    let tiles = [(k, Side::Key), (v, Side::Value)].map(|(head, side)| StreamTiles::new(head, side));
    let config = KernelConfig { simd, precision: Precision::Fast };
    let keys = side_kernels::KeyKernel::new(config, k, tiles[0].as_ref(), &vec![1.0; k.dim()]);
    [keys.is_some(), side_kernels::ValueKernel::new(config, v, tiles[1].as_ref(), 1).is_some()]
}

#[test]
fn rounded_codecs_have_kernels() {
    for name in ROUNDED {
        let codec = codec(&geometry(64), name);
        for simd in Simd::available_levels() {
            assert_eq!(kernels(&codec, simd), [true; 2], "{name}, {simd:?}");
        }
    }
}

#[test]
fn keys_and_values_may_differ_in_size_and_blocks_may_be_longer() {
    let ask = Question { group: 3, n_q: 2, position: 174, window: None, cap: None };
    for name in SHAPED {
        for (dim_k, dim_v) in [(128, 64), (64, 96)] {
            check(&geometry_of(dim_k, dim_v), name, InputKind::Normal, &[ask]);
        }
        let blocks = Geometry { block_tokens: 128, ..geometry(64) };
        check(&blocks, name, InputKind::Normal, &[Question { position: 302, ..ask }]);
    }
}

/// Codecs of every kind of sum over channels.
const SUMMED: &[&str] = &[
    "kivi-4",
    "k=uniform(b=8,axis=channel); v=uniform(b=1,axis=token)",
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "innerq-2",
    "turbo-4",
    "polar-4+4",
    "kvcomp",
    "k=mean+qpca/grid(rate=4)/huffman; v=hadamard/grid(rate=1)/huffman",
    "k=bitalloc(b=0.7); v=gain/bitalloc(b=7.4)",
];

#[test]
fn keys_of_latent_attention_have_kernels_and_are_right() {
    let ask = Question { group: 4, n_q: 1, position: 175, window: None, cap: None };
    // As DeepSeek's are; an emulator would take minutes for the fits.
    let dims = if emulated() { (288, 256) } else { (576, 512) };
    let geometry = geometry_of(dims.0, dims.1);
    for name in SUMMED {
        let codec = codec(&geometry, name);
        for simd in Simd::available_levels() {
            assert_eq!(kernels(&codec, simd), [true; 2], "{name}, {simd:?}");
        }
        for data in [InputKind::Normal, InputKind::Outlier] {
            check(&geometry, name, data, &[ask]);
        }
    }
}

#[test]
fn keys_too_wide_for_sums_of_integers_are_decoded() {
    let ask = Question { group: 1, n_q: 1, position: 175, window: None, cap: None };
    let geometry = geometry(1024);
    // Sums of small codes fit all the same.
    let names = ["k=uniform(b=8,axis=channel); v=uniform(b=1,axis=token)", "turbo-4", "kivi-4"];
    for (name, fused) in names.into_iter().zip([false, false, true]) {
        let codec = codec(&geometry, name);
        for simd in Simd::available_levels() {
            assert_eq!(kernels(&codec, simd), [fused, true], "{name}, {simd:?}");
        }
        check_codec(codec, name, InputKind::Outlier, &[ask]);
    }
}

/// Whether keys and values of a preset are to have a kernel at that head size.
fn has_kernels(preset: &str, dim: u32, simd: Simd) -> [bool; 2] {
    match preset {
        // Books of their own for groups of channels, of 4096 entries, or two of them one after the
        // other.
        "raw" | "cq-2" | "cq-4" | "vq-residual-4" | "vecinfer-3" | "vecinfer-1.5" => [false; 2],
        // Codes of eight channels, four at a time.
        "vecinfer-1.25" => [false, dim.is_multiple_of(32)],
        "fp8" => [simd.vector_set() != InstructionSet::Portable; 2],
        _ => [true; 2],
    }
}

#[test]
fn presets_have_kernels_at_head_sizes_of_models() {
    // Fits of every preset at every size are most of an emulator's time: other sizes are compared
    // where there is none.
    let dims: &[u32] = if emulated() { &[64, 80] } else { &[64, 80, 96, 128, 256] };
    for &dim in dims {
        for preset in kvd_codec::presets() {
            let codec = codec(&geometry(dim), preset.name);
            for simd in Simd::available_levels() {
                let wanted = has_kernels(preset.name, dim, simd);
                assert_eq!(kernels(&codec, simd), wanted, "{}, {dim}, {simd:?}", preset.name);
            }
        }
    }
}

/// A calibration whose keys have classes of the coefficient before: runs end within quads.
fn shifted(calibration: &Calibration) -> Calibration {
    let mut bytes = calibration.to_bytes();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = std::str::from_utf8(&bytes[8..header]).unwrap();
    let class = &text[text.find("\"0.class\"").unwrap()..];
    let offsets = &class[class.find("data_offsets\":[").unwrap() + 15..];
    let offsets = &offsets[..offsets.find(']').unwrap()];
    let offsets: Vec<usize> = offsets.split(',').map(|at| at.parse().unwrap()).collect();
    bytes[header..][offsets[0]..offsets[1]].rotate_right(1);
    Calibration::from_bytes(&bytes).unwrap()
}

#[test]
fn keys_of_256_channels_have_a_kernel_though_their_runs_fill_more_positions() {
    let (geometry, name) = (geometry(256), "kvd-4");
    let spec = kvd_codec::resolve_spec(name).unwrap();
    let calibration = shifted(&fitted(&geometry, &spec));
    let codec = ModelCodec::new(geometry, spec, Some(&calibration)).unwrap();
    let tiles = StreamTiles::new(codec.head_codec(LAYER, Side::Key, 0), Side::Key).unwrap();
    assert!(tiles.per_row > 256, "{}", tiles.per_row);
    for simd in Simd::available_levels() {
        assert_eq!(kernels(&codec, simd), [true; 2], "{simd:?}");
    }
    let ask = Question { group: 3, n_q: 1, position: 175, window: None, cap: None };
    check_codec(codec, name, InputKind::Normal, &[ask]);
}

#[test]
fn narrow_uniform_codes_are_multiplied_as_bf16_or_bytes_where_the_machine_can() {
    let codec = codec(&geometry(64), "kivi-4");
    let [k, v] = Side::BOTH.map(|side| codec.head_codec(LAYER, side, 0));
    for simd in Simd::available_levels() {
        for (precision, rows) in [(Precision::Int8, 1), (Precision::Int8, 5), (Precision::Fast, 1)]
        {
            let config = KernelConfig { simd, precision };
            let keys = side_kernels::KeyKernel::new(config, k, None, &vec![1.0; 64 * rows]);
            let values = side_kernels::ValueKernel::new(config, v, None, rows);
            // AMX multiplies bytes of more rows than vectors take.
            let wanted = simd.has_bf16() && precision == Precision::Int8;
            let wanted = wanted && !(simd.has_amx() && rows > 4);
            assert_eq!(
                matches!(keys, Some(side_kernels::KeyKernel::Bf16(_))),
                wanted,
                "{config:?} {rows}"
            );
            assert_eq!(
                matches!(values, Some(side_kernels::ValueKernel::Bf16(_))),
                wanted,
                "{config:?} {rows}"
            );
            let wanted = simd.level() == InstructionSet::Avx2 && precision == Precision::Int8;
            assert_eq!(
                matches!(keys, Some(side_kernels::KeyKernel::Nibbles(_))),
                wanted,
                "{config:?} {rows}"
            );
            assert_eq!(
                matches!(values, Some(side_kernels::ValueKernel::Nibbles(_))),
                wanted,
                "{config:?} {rows}"
            );
        }
    }
}

/// Holds the table of kernels to what is built of it.
fn compare_with_table(codec: &ModelCodec, config: KernelConfig, rows: usize, name: &str) {
    let config = attend_job::effective_config(config, rows);
    let target = kernel_table::KernelTarget::new(config, rows);
    let [k, v] = Side::BOTH.map(|side| codec.head_codec(LAYER, side, 0));
    let tiles = [(k, Side::Key), (v, Side::Value)].map(|(head, side)| StreamTiles::new(head, side));
    let [k_tiles, v_tiles] = tiles.each_ref().map(Option::as_ref);
    let keys = side_kernels::KeyKernel::new(config, k, k_tiles, &vec![1.0; k.dim() * rows]);
    let values = side_kernels::ValueKernel::new(config, v, v_tiles, rows);
    let keys = keys.map(|keys| keys.kernel_id());
    assert_eq!(kernel_table::find_key_kernel(target, k, k_tiles), keys, "{name} {config:?} {rows}");
    let values = values.map(|values| values.kernel_id());
    let found = kernel_table::find_value_kernel(target, v, v_tiles);
    assert_eq!(found, values, "{name} {config:?} {rows}");
}

#[test]
fn the_table_of_kernels_names_what_runs() {
    let others = ["raw", "fp8", "k=lloyd(b=4); v=lloyd(b=4)"];
    let rounded = ROUNDED.iter().chain(&others).map(|name| (*name, 64));
    for (name, dim) in rounded.chain(SHAPED.iter().map(|name| (*name, 80))) {
        let codec = codec(&geometry(dim), name);
        for simd in Simd::available_levels() {
            for precision in Precision::ALL {
                for rows in [1, 5] {
                    compare_with_table(&codec, KernelConfig { simd, precision }, rows, name);
                }
            }
        }
    }
}
