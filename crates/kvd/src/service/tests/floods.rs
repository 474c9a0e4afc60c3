//! An attend of one namespace beside a flood of another: it waits for a unit, by count.

use super::bench::{Bench, CountedUnits, SliceEvent, call, chunk, spec, stranger};
use super::shares::{batch, stored_tokens, until};
use crate::service::CallContext;
use kvd_core::Namespace;
use std::sync::mpsc;

/// Tokens of which an attend is not small.
const TOKENS: u32 = 1 << 14;
/// Query tokens of the attend that comes, by which it is known.
const COMING: u32 = 3;

/// A flood of so many calls, which go in one pass of so many units.
#[derive(Clone, Copy)]
struct Flood {
    calls: usize,
    units: usize,
}

impl Flood {
    /// Lets an attend of a caller come while the second unit runs; how many units ran before it.
    async fn count_units_before(self, coming: CallContext) -> usize {
        let bench = Bench::new(64 << 20, &[("namespaces.allowed", "[\"*\"]")]);
        let of_flood = stored_tokens(&bench, TOKENS).await;
        let model = bench.service.register_model(&coming, spec("b", "raw")).await.unwrap().shape.id;
        let sequence = bench.service.open_sequence(&coming, model).unwrap();
        bench.service.store_chunk(&coming, chunk(sequence, 0, TOKENS)).await.unwrap();
        let ask = |call: CallContext, batch| {
            let service = bench.service.clone();
            tokio::spawn(async move { service.attend_batch(&call, batch).await })
        };
        let gate = bench.hold().await;
        let flood = stranger();
        let calls: Vec<_> =
            (0..self.calls).map(|_| ask(flood.clone(), batch(of_flood, 1, None))).collect();
        bench.queued(self.calls).await;
        let [(begun, has_begun), (go, may_go)] = [0, 1].map(|_| mpsc::sync_channel(1));
        let units = CountedUnits { count: self.units, begun, go: may_go };
        *bench.probe.next_slice.lock() = SliceEvent::Units(units);
        drop(gate);
        until(|| has_begun.try_recv().is_ok()).await;
        let coming = ask(coming, batch((model, sequence), COMING, None));
        bench.queued(1).await;
        go.send(()).unwrap();
        coming.await.unwrap().unwrap();
        for call in calls {
            call.await.unwrap().unwrap();
        }
        // The pass, who came, and the rest of the pass.
        assert_eq!(bench.probe.asked.lock()[..2], [self.calls, COMING as usize]);
        *bench.probe.units.lock()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attend_of_an_idle_namespace_waits_for_one_unit_of_a_flood_of_any_length() {
    let namespace = Namespace::new("victim").unwrap();
    for units in [2, 16, 1000] {
        for calls in [1, 16] {
            let victim = CallContext { namespace: namespace.clone(), ..stranger() };
            let flood = Flood { calls, units };
            assert_eq!(flood.count_units_before(victim).await, 2, "{calls} calls, {units} units");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attend_of_the_same_namespace_waits_for_a_slice() {
    for calls in [1, 16] {
        let flood = Flood { calls, units: 16 };
        let same = CallContext { owner: stranger().owner, ..call() };
        assert_eq!(flood.count_units_before(same).await, 16, "{calls} calls");
    }
}
