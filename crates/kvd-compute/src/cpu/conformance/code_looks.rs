//! Looks at the codes of values, which say how large those are: where a side was asked for them
//! once, they are made while its codes are multiplied (`value_looks.rs`).

use super::*;

#[test]
fn looks_at_codes_on_the_way_answer_as_those_afterwards() {
    let geometry = geometry(128);
    for name in ["kvd-1.5", "kvd-1"] {
        let mut looks = 0;
        let codec = codec(&geometry, name);
        // Windows that begin within a tile, and within a page but at a tile.
        let asks = [(16, None), (64, None), (64, Some(1700)), (64, Some(1696))];
        let kinds = [(3.0, 1.0), (8.0, 1.0), (3.0, 1e-3), (3.0, 0.02)];
        for ((scale, quiet), (blocks, window)) in
            kinds.into_iter().flat_map(|kind| asks.map(|ask| (kind, ask)))
        {
            let (mut backend, parts) =
                filled_with(codec.clone(), &vec![64; blocks], |block, tokens| {
                    let count = tokens as usize * HEADS * 128;
                    let [keys, mut rows] = [2, 3].map(|side| values(count, 1000 * side + block));
                    // Most values are so small that their sums are beside what codes may hold.
                    for (row, values) in rows.chunks_exact_mut(128).enumerate() {
                        let size = if row.is_multiple_of(16) { 1.0 } else { quiet };
                        values.iter_mut().for_each(|value| *value *= size);
                    }
                    [keys, rows]
                });
            let position = 64 * blocks as u32 - 1;
            let ask = Question { group: 4, n_q: 1, position, window, cap: None };
            let mut plan = plan(&geometry, &parts, InputKind::Normal, ask);
            let q: Vec<f32> = floats(&plan.q).iter().map(|q| scale * *q as f32).collect();
            plan.q = payload(DType::F32, &q);
            let wants = |backend: &CpuBackend| {
                let wants = |job: &attend_job::AttendJob<'_>| {
                    let side = |head| job.reader.codec.head_codec(LAYER, Side::Value, head);
                    Ok((0..HEADS).any(|head| job.looks.wants_look(side(head))))
                };
                backend.with_job(&plan, wants).unwrap()
            };
            assert!(!wants(&backend), "{name}");
            let first = backend.attend(&plan).unwrap();
            looks += u32::from(wants(&backend));
            let next = backend.attend(&plan).unwrap();
            assert_eq!(
                (first.out, first.lse),
                (next.out, next.lse),
                "{name}, {blocks}, {window:?}"
            );
        }
        assert!(looks > 0, "{name}");
    }
}
