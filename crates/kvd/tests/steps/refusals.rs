//! Steps that cannot be: refused before any work, by region and by gRPC.

use super::{
    DONE, Host, MEMORY_BYTES, ROOM, TOKEN, WAYS, Way, blocking, dense_part, dense_step, noise,
};
use kvd_client::{ErrorCode, LayerIndex, LoadStep, RowLayout, RowTable, StepPart, StoreStep};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layouts_that_cannot_be_are_refused_before_any_work() {
    let host = Host::start(&[("limits.step_rows_max", "3000")]).await;
    let model = host.model("raw").await;
    let sequence = host.open(model).await;
    // 600 rows a side.
    let (k, v) = (noise(13, 100), noise(14, 100));
    let good = dense_step(model, sequence, 0, [&k, &v]);
    let part = good.parts[0].clone();
    let side = part.v.offset;
    let with_k = |k: RowLayout| StepPart { k, ..part.clone() };
    let table = |block_tokens, blocks: Vec<u32>, first_row| {
        let table = RowTable { block_tokens, block_stride: 0, blocks, first_row };
        let layer_stride = 100 * TOKEN;
        with_k(RowLayout { layer_stride, table: Some(table), ..RowLayout::default() })
    };
    let max = u64::MAX;
    let from = RowLayout::from_offset;
    use ErrorCode::{InvalidArgument, LimitExceeded};
    let bad = [
        (with_k(from(side + 1)), InvalidArgument, "parts[0].k: its rows end at byte"),
        (with_k(from(max)), InvalidArgument, "parts[0].k: its rows end"),
        (with_k(RowLayout { layer_stride: max, ..from(0) }), InvalidArgument, "rows end at"),
        (with_k(RowLayout { token_stride: max, ..from(0) }), InvalidArgument, "beyond 2^64"),
        (with_k(RowLayout { head_stride: max, ..from(8) }), InvalidArgument, "beyond 2^64"),
        (table(16, vec![0; 6], 0), InvalidArgument, "6 blocks; 100 tokens from row 0 take 7"),
        (table(16, vec![0; 8], 0), InvalidArgument, "8 blocks"),
        (table(16, vec![0; 7], 16), InvalidArgument, "first_row 16 is not in a block"),
        (table(100, vec![u32::MAX], 0), InvalidArgument, "rows end at byte"),
        (StepPart { first_layer: LayerIndex(3), ..part.clone() }, InvalidArgument, "first_layer 3"),
        (StepPart { layers: Some(4), ..part.clone() }, InvalidArgument, "4 from layer 0"),
        (StepPart { layers: Some(u32::MAX), ..part.clone() }, InvalidArgument, "from layer 0"),
        (StepPart { tokens: 400, ..part.clone() }, LimitExceeded, "limits.step_rows_max = 3000"),
    ];
    for way in WAYS {
        for (bad, code, text) in bad.clone() {
            // A region is larger than the memory of these steps, and so are its limits.
            let step = StoreStep { parts: vec![bad], ..good.clone() };
            if way == Way::Region && text.contains("parts[0].k: its rows end at byte") {
                continue;
            }
            let (memory, parts) = (vec![0; 2 * MEMORY_BYTES as usize], step.parts.clone());
            let roomy = code == LimitExceeded && way == Way::Grpc;
            let step = if roomy { StoreStep { memory: memory.into(), ..step } } else { step };
            let refused = host.store(way, step).await.unwrap_err();
            assert_eq!(refused.code, Some(code), "{way:?}: {refused}");
            assert!(refused.message.contains(text), "{way:?}: {refused}");
            let memory_bytes = if roomy { 2 * MEMORY_BYTES } else { 2 * side };
            let load = LoadStep { model, parts, dtype: None, memory_bytes };
            let refused = host.load(way, load).await.unwrap_err();
            assert_eq!(refused.code, Some(code), "{way:?}: {refused}");
        }
    }
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_that_meet_or_are_too_many_are_refused() {
    let host = Host::start(&[]).await;
    let model = host.model("raw").await;
    let sequence = host.open(model).await;
    let (k, v) = (noise(13, 100), noise(14, 100));
    let good = dense_step(model, sequence, 0, [&k, &v]);
    let part = good.parts[0].clone();
    let side = part.v.offset;
    let from = RowLayout::from_offset;
    use ErrorCode::{InvalidArgument, LimitExceeded};
    for way in WAYS {
        let twice = StoreStep { parts: vec![part.clone(); 2], ..good.clone() };
        let twice = host.store(way, twice).await.unwrap_err();
        assert!(twice.message.contains("parts[0] and parts[1] have layer 0"), "{twice}");
        let many = StoreStep { parts: vec![part.clone(); 4097], ..good.clone() };
        let many = host.store(way, many).await.unwrap_err();
        assert_eq!(many.code, Some(LimitExceeded), "{many}");
        // Rows that a load would write twice.
        let meeting = StepPart { v: from(side - 1), ..part.clone() };
        let load = LoadStep { model, parts: vec![meeting], dtype: None, memory_bytes: 2 * side };
        let refused = host.load(way, load).await.unwrap_err();
        assert_eq!(refused.code, Some(InvalidArgument), "{refused}");
        assert!(refused.message.contains(&format!("byte {}", side - 1)), "{refused}");
        assert_eq!(host.lengths(sequence).await, [0, 0, 0]);
    }
    // Memory beside a region, which is none.
    let calls = host.region.control_calls(DONE, ROOM);
    let refused = blocking(|| calls.store_step(StoreStep { memory: vec![0].into(), ..good }));
    assert!(refused.unwrap_err().message.starts_with("memory: rows of a call through a region"));
    let load = LoadStep { model, parts: vec![part], dtype: None, memory_bytes: 1 };
    let refused = blocking(|| calls.load_step(load)).unwrap_err();
    assert!(refused.message.starts_with("memory_bytes: "), "{refused}");
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_layer_that_would_be_no_message_and_layers_without_end_are_refused() {
    let flags = [
        ("server.message_bytes_max", "256 KiB"),
        ("limits.calibration_bytes_max", "64 KiB"),
        ("limits.step_rows_max", "10000"),
    ];
    let host = Host::start(&flags).await;
    let model = host.model("raw").await;
    let sequence = host.open(model).await;
    let memory = bytes::Bytes::new();
    // One layer of 600 tokens takes 300 KiB.
    let part = StepPart { layers: Some(1), ..dense_part(sequence, 0, 600) };
    let step = StoreStep { model, parts: vec![part], memory: memory.clone() };
    let refused = host.store(Way::Region, step).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge), "{refused}");
    assert!(refused.message.contains("one layer of a part takes 307200 bytes"), "{refused}");
    // Three layers of one token count as 384 rows, so that 27 parts are too many.
    let parts = vec![dense_part(sequence, 0, 1); 27];
    let step = StoreStep { model, parts, memory };
    let refused = host.store(Way::Region, step).await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::LimitExceeded), "{refused}");
    host.running.drain().await;
}
