//! Blocks that leave one backend and come to another: what that answers is the same, bit by bit.

use super::*;
use kvd_compute::{ImportOutcome, LayerSlots, PageSlots, export_layer, import_layer};

/// Where the blocks lie on the backend to which they come.
const OFFSET: u64 = 512 << 10;

/// Slots of a part, moved by `by`.
fn slots_of(part: &PlanPart, by: u64) -> LayerSlots {
    let moved = |extent: Extent| Extent { offset: extent.offset + by, len: extent.len };
    match &part.source {
        Source::Raw { extent, .. } => {
            LayerSlots { rows: Some(moved(*extent)), ..LayerSlots::default() }
        }
        Source::Pages { extent, ends, .. } => {
            let pages = PageSlots { extent: moved(*extent), ends: ends.clone() };
            LayerSlots { pages: Some(pages), ..LayerSlots::default() }
        }
    }
}

fn move_part(part: &PlanPart) -> PlanPart {
    let mut part = part.clone();
    let (Source::Raw { extent, .. } | Source::Pages { extent, .. }) = &mut part.source;
    extent.offset += OFFSET;
    part
}

/// Encodes rows of another kind, so that the model's first tables are others.
fn train_otherwise(backend: &mut dyn Backend, codec: &ModelCodec) {
    let geometry = codec.geometry();
    let extent = Extent { offset: 0, len: geometry.raw_layout(BLOCKS[0]).size_bytes() };
    let count = BLOCKS[0] as usize * KV_HEADS * DIM;
    let rows: Vec<f32> = make_values(77, count).iter().map(|x| x * x * x * 9.0).collect();
    let (_, rows) = narrow_rows(geometry.dtype, &rows);
    let incoming = IncomingRows { tokens: BLOCKS[0], k: rows.clone(), v: rows };
    let to = RawTarget { extent, capacity_rows: BLOCKS[0], first_row: 0 };
    backend.write(MODEL, &incoming, 0, BLOCKS[0], to).unwrap();
    let source = EncodeSource { extent, capacity_rows: BLOCKS[0], first_row: 0, rows: BLOCKS[0] };
    for _ in 0..3 {
        backend.encode(MODEL, LAYER, &[source]).unwrap().remove(0).unwrap();
    }
}

/// Moves the blocks of a codec from one backend to another and asks both. Then damages them.
pub fn check_transfer(from: &mut dyn Backend, to: &mut dyn Backend, text: &'static str) {
    let case = AttendCase { ragged: true, ..AttendCase::new(text, RopePairing::Half) };
    let stored = store_blocks(from, &case).unwrap_or_else(|| panic!("{text} is not served"));
    let (plan, _) = case.attend_plan(&stored);
    let fresh = make_codec_of(text, geometry(case.pairing, case.dtype));
    to.register(MODEL, fresh.clone());
    train_otherwise(to, &fresh);
    let mut images = Vec::new();
    for part in &stored.parts {
        let image = export_layer(from, MODEL, LAYER, &slots_of(&part.plan, 0)).unwrap();
        let mut copy = image.clone();
        let slots = slots_of(&part.plan, OFFSET);
        let done = import_layer(to, MODEL, LAYER, &mut copy, &slots).unwrap();
        assert_eq!(done, ImportOutcome::Imported, "{text}");
        images.push((image, slots));
    }
    let answer = from.attend(&plan).unwrap();
    let mut there = plan.clone();
    for query in &mut there.queries {
        query.parts = query.parts.iter().map(move_part).collect();
    }
    let arrived = to.attend(&there).unwrap();
    assert!(answer.out == arrived.out && answer.lse == arrived.lse, "{text}: other answers");
    for (image, slots) in &images {
        let mut damaged = image.clone();
        let bytes = if damaged.pages.is_empty() { &mut damaged.rows } else { &mut damaged.pages };
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        let error = import_layer(to, MODEL, LAYER, &mut damaged, slots).unwrap_err();
        assert_eq!(kvd_core::Coded::code(&error), kvd_core::ErrorCode::CorruptPage, "{text}");
    }
    from.unregister(MODEL);
    to.unregister(MODEL);
}
