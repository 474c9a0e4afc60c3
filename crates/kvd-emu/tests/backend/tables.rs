//! Tables of layers: their room, and the first ones of Huffman codes.

use super::*;
use kvd_codec::CodeCounts;
use kvd_cuda::{LatePairs, LaunchChoices, LayerMemory, LayerShapes, StoreShapes};

/// Upper bound of the tables of a model's only layer, as they are on the device.
fn room(codec: &ModelCodec) -> u64 {
    let room = layer_room(codec).1;
    [room.tables, room.steps, room.turns]
        .iter()
        .map(|bytes| bytes.next_multiple_of(256) as u64)
        .sum()
}

fn layer_room(codec: &ModelCodec) -> (LayerShapes, LayerMemory) {
    let layer = LayerIndex(0);
    let choices =
        LaunchChoices::for_layer(codec, layer, 8, (&GpuLimits::h100(), LatePairs::NONE)).unwrap();
    let shapes = LayerShapes::new(codec, layer, choices.codebook_rooms());
    let room = LayerMemory::new(codec, layer, &shapes);
    (shapes, room)
}

#[test]
fn a_model_whose_tables_have_no_room_is_refused_before_it_is_registered() {
    if !is_available() {
        return;
    }
    let codec = |text: &str| conformance::make_codec(text, RopePairing::Half);
    let [small, large] = ["kivi-4", "kvd-2"].map(|text| room(&codec(text)));
    let table_bytes = small + large - 256;
    let (mut backend, watch, part) = with_rows(CudaOptions { table_bytes, ..OPTIONS });
    let plan = conformance::attend_plan(vec![part.clone()], 1);
    let first = backend.attend(&plan).unwrap();
    let refused = backend.supports(&codec("kvd-2")).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::LimitExceeded);
    let refused = refused.to_string();
    let left = table_bytes - small;
    for part in [&format!("up to {large} bytes"), &format!("{left} are left"), "device.table_bytes"]
    {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    // Who does not ask is told by the first call that needs them, and others go on.
    backend.register(ModelId(2), codec("kvd-2"));
    let other = AttendPlan { model: ModelId(2), ..plan.clone() };
    let error = backend.attend(&other).unwrap_err();
    assert_eq!((error.code(), error.to_string()), (ErrorCode::LimitExceeded, refused));
    assert_eq!(backend.failure(), None);
    let again = backend.attend(&plan).unwrap();
    assert_eq!((again.out, again.lse), (first.out, first.lse));
    // A model that is gone leaves its room, also one that is replaced.
    backend.unregister(ModelId(2));
    for _ in 0..10 {
        backend.register(ModelId(1), codec("kivi-4"));
        backend.attend(&plan).unwrap();
    }
    backend.unregister(ModelId(1));
    backend.supports(&codec("kvd-2")).unwrap();
    drop(backend);
    assert_eq!(watch.lock().live, 0);
}

#[test]
fn a_model_has_room_for_every_version_of_its_huffman_tables() {
    // Codes of more than 8 and 12 bits, heads that have tables of their own.
    let others = [
        "k=uniform(rel=0.004,axis=block)/huffman; v=fp8/huffman",
        "k=vq(d=2,b=9)/huffman; v=vq(d=4,b=4)/huffman",
        "kvcomp; k[head=1]=uniform(b=2,axis=channel)/huffman; v[head=0]=fp8",
    ];
    let mut trained = 0;
    for text in conformance::list_codecs().chain(others) {
        let mut codec = conformance::make_codec(text, RopePairing::Half);
        let layer = LayerIndex(0);
        let room = layer_room(&codec).1;
        for version in 0..=ModelCodec::TABLE_VERSIONS_MAX as u32 {
            let (shapes, _) = layer_room(&codec);
            let store = StoreShapes::new(&codec, layer, &shapes);
            let steps = store.map_or(0, |store| store.steps.len());
            assert!(shapes.tables.len() <= room.tables, "{text}: {version} versions");
            assert!(steps <= room.steps, "{text}: {steps} of {} bytes", room.steps);
            if !codec.needs_tables(layer) && version == 0 {
                assert_eq!((shapes.tables.len(), steps), (room.tables, room.steps), "{text}");
                break;
            }
            trained += 1;
            train(&mut codec, version);
        }
    }
    assert!(trained > 17 * others.len(), "{trained}");
}

/// A version more of a layer's Huffman tables, from counts that differ by version.
fn train(codec: &mut ModelCodec, version: u32) {
    let heads = || Side::BOTH.into_iter().flat_map(|side| [0, 1].map(|head| (side, head)));
    let mut all = Vec::<CodeCounts>::new();
    for (side, head) in heads() {
        let Some((variant, codes)) = codec.counted_codes(LayerIndex(0), side, head) else {
            continue;
        };
        // From one symbol that is nearly all to codes of one length.
        let count =
            |code: u64| 1 + (1 << (2 * version).min(40)) / (1 + (code + 7 * version as u64) % 97);
        let counts = (0..codes as u64).map(count).collect();
        if !all.iter().any(|of| (of.side, of.variant) == (side, variant)) {
            all.push(CodeCounts { side, variant, counts });
        }
    }
    codec.train_tables_from(LayerIndex(0), &all).unwrap();
}

#[test]
fn first_tables_of_a_layer_are_the_hosts_and_its_rows_stay_on_the_device() {
    if !is_available() {
        return;
    }
    let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / 8_388_608.0 - 1.0;
    let rows = 8 * 2 * (64 + 64) * 4;
    assert_eq!(counters("kvcomp"), 240);
    for text in ["kvcomp", "kvcomp-channel"] {
        // The tables that the host alone makes from these rows, at this place.
        let mut host = CpuBackend::new(CpuOptions {
            arena_bytes: OPTIONS.arena_bytes,
            prefault: false,
            threads: 1,
        })
        .unwrap();
        host.register(ModelId(1), conformance::make_codec(text, RopePairing::Half));
        // All at once; a block at a time; none, so that the host counts.
        for (scratch_bytes, counted, whole) in
            [(1 << 20, true, true), (12 << 10, true, false), (512, false, false)]
        {
            let options = CudaOptions { scratch_bytes, ..OPTIONS };
            let (mut backend, watch, part) = with_codec(text, value, Pace::Late, options);
            let blocks = blocks(&part, 20);
            let bytes: Vec<u8> = (0..8 * 2 * 64).flat_map(|i| value(i).to_le_bytes()).collect();
            let both = IncomingRows { tokens: 8, k: bytes.clone().into(), v: bytes.into() };
            let to = RawTarget { extent: blocks[0].extent, capacity_rows: 8, first_row: 0 };
            host.unregister(ModelId(1));
            host.register(ModelId(1), conformance::make_codec(text, RopePairing::Half));
            host.write(ModelId(1), &both, 0, 8, to).unwrap();
            let wanted = host.encode(ModelId(1), LayerIndex(0), &blocks).unwrap();
            let encoded = backend.encode(ModelId(1), LayerIndex(0), &blocks).unwrap();
            let made = |kernel: &String| kernel.starts_with("kvd_histogram_");
            assert_eq!(watch.lock().kernels.iter().any(made), counted, "{scratch_bytes}");
            if whole {
                // Six are measured.
                let wanted = 6 * rows + 14 * 4 * 32 + counters(text);
                assert_eq!(watch.lock().read_bytes, wanted, "{text}");
            }
            let versions = backend.model_bytes(ModelId(1)).unwrap().table_versions;
            assert_eq!(versions, host.model_bytes(ModelId(1)).unwrap().table_versions);
            for (pages, wanted) in encoded.iter().zip(&wanted) {
                let (pages, wanted) = (pages.as_ref().unwrap(), wanted.as_ref().unwrap());
                assert!(pages.held.is_some() || pages.bytes == wanted.bytes, "{text}");
                assert_eq!(pages.page_ends, wanted.page_ends, "{text}");
                assert_eq!(pages.packed.parts, wanted.packed.parts, "{text}");
            }
            assert_eq!(backend.failure(), None);
        }
    }
}
