//! Metrics of several devices are told apart.

use super::bench::{call, chunk, several, spec};
use kvd_compute::Backend;

/// The value of a series by its exact name and labels.
fn value(page: &str, series: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in\n{page}")).parse().unwrap()
}

#[tokio::test]
async fn pools_and_work_are_shown_by_device() {
    let (service, _probes) = several(2, 1 << 16, &[]);
    let mut sequences = Vec::new();
    for name in ["a", "b"] {
        let model = service.register_model(&call(), spec(name, "raw")).await.unwrap();
        sequences.push((model.shard, service.open_sequence(&call(), model.shape.id).unwrap()));
    }
    assert_eq!([sequences[0].0, sequences[1].0], [0, 1]);
    service.store_chunk(&call(), chunk(sequences[1].1, 0, 64)).await.unwrap();
    service.refresh_gauges();
    let page = service.metrics().render_page();
    let of = |name: &str, device: usize, more: &str| {
        value(&page, &format!("{name}{{device=\"{device}\"{more}}}"))
    };
    let tier = ",tier=\"host\"";
    assert_eq!(of("kvd_pool_used_bytes", 0, tier), 0.0);
    assert!(of("kvd_pool_used_bytes", 1, tier) >= 2048.0);
    assert_eq!(of("kvd_pool_capacity_bytes", 0, tier), f64::from(1 << 16));
    assert!(of("kvd_pool_slots", 1, tier) >= 1.0 && of("kvd_pool_slots", 0, tier) == 0.0);
    assert_eq!(of("kvd_store_seconds_count", 0, ""), 0.0);
    assert_eq!(of("kvd_store_seconds_count", 1, ""), 1.0);
    let busy = |device| of("kvd_device_busy_seconds_total", device, ",kind=\"other\"");
    assert!(busy(1) > 0.0);
    let devices: Vec<_> = service.device_pools().map(|pool| pool.device.to_owned()).collect();
    assert_eq!(devices, ["0", "1"]);
    let used: Vec<_> = service.device_pools().map(|pool| pool.pool.used_bytes).collect();
    assert!(used[0] == 0 && used[1] == service.pool_stats().used_bytes, "{used:?}");
    // A job that waits is of its device and kind.
    let worker = service.workers().nth(1).unwrap().clone();
    let (release, released) = std::sync::mpsc::sync_channel::<()>(1);
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let holding = tokio::spawn(async move {
        let work = move |_: &mut dyn Backend| {
            let _ = begun.send(());
            let _ = released.recv();
            Ok(())
        };
        worker.run_closure(&call(), work).await
    });
    has_begun.await.unwrap();
    let (waiting, worker) = (service.clone(), service.workers().nth(1).unwrap().clone());
    let store = tokio::spawn(async move {
        waiting.store_chunk(&call(), chunk(sequences[1].1, 64, 16)).await.map(|_| ())
    });
    while worker.queued_jobs() < 1 {
        tokio::task::yield_now().await;
    }
    service.refresh_gauges();
    let page = service.metrics().render_page();
    let waits = |device: usize, kind: &str| {
        value(&page, &format!("kvd_queue_depth{{device=\"{device}\",kind=\"{kind}\"}}"))
    };
    let depths = [waits(0, "attend"), waits(0, "other"), waits(1, "attend"), waits(1, "other")];
    assert_eq!(depths, [0.0, 0.0, 0.0, 1.0]);
    drop(release);
    holding.await.unwrap().unwrap();
    store.await.unwrap().unwrap();
}
