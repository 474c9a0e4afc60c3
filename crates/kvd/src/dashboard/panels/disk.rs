//! The row of the cache's disk tier.

use super::{DEVICE, DashboardPanel, lines};
use crate::dashboard::query::{PanelQuery, quantile_queries};
use crate::metrics::Metric;

const TIER: &[&str] = &["instance", "tier"];

pub(super) fn disk_panels() -> Vec<DashboardPanel> {
    use Metric::{
        CorruptRecordsTotal, DiskEntries, DurableLag, EvictedToDiskTotal, ImportRefusedTotal,
        PromoteSeconds, PromotedBlocksTotal, RecoverSeconds, RecoveredBlocksTotal,
        ReinsertedBytesTotal, Segments, TierCapacityBytes, TierErrorsTotal, TierQueueBytes,
        TierReadBytesTotal, TierState, TierUsedBytes, TierWriteBytesTotal, TierWriteDropsTotal,
    };
    let instance = &["instance"];
    let bytes = [
        PanelQuery::level(TierUsedBytes, TIER).named("used"),
        PanelQuery::level(TierCapacityBytes, TIER).named("capacity"),
    ];
    let traffic = [
        PanelQuery::rate(TierWriteBytesTotal, TIER).named("written"),
        PanelQuery::rate(TierReadBytesTotal, TIER).named("read"),
        PanelQuery::rate(ReinsertedBytesTotal, instance).named("kept of old segments"),
    ];
    let blocks = [
        PanelQuery::rate(EvictedToDiskTotal, DEVICE).named("left the pool"),
        PanelQuery::rate(PromotedBlocksTotal, instance).named("came back"),
    ];
    let by_reason = &["instance", "tier", "reason"];
    vec![
        lines("State", "none", [PanelQuery::level(TierState, TIER)]).explained(TierState),
        lines("Bytes on disk", "bytes", bytes).explained(TierUsedBytes),
        lines("Blocks on disk", "none", [PanelQuery::level(DiskEntries, DEVICE)])
            .explained(DiskEntries),
        lines("Segments", "none", [PanelQuery::level(Segments, instance)]).explained(Segments),
        lines("Bytes a second", "Bps", traffic)
            .described("Written, read, and copied to the front."),
        lines("Blocks to and from disk", "ops", blocks).explained(PromotedBlocksTotal),
        lines("Wait for disk", "s", quantile_queries(PromoteSeconds, instance, ""))
            .explained(PromoteSeconds),
        lines("Waiting to be written", "bytes", [PanelQuery::level(TierQueueBytes, TIER)])
            .explained(TierQueueBytes),
        lines("Durable lag", "s", [PanelQuery::level(DurableLag, instance)]).explained(DurableLag),
        lines("Not written", "ops", [PanelQuery::rate(TierWriteDropsTotal, by_reason)])
            .explained(TierWriteDropsTotal),
        lines("Disk errors", "ops", [PanelQuery::rate(TierErrorsTotal, by_reason)])
            .explained(TierErrorsTotal),
        lines(
            "Shorter than matched",
            "ops",
            [
                PanelQuery::rate(ImportRefusedTotal, &["instance", "reason"]),
                PanelQuery::rate(CorruptRecordsTotal, TIER).named("damaged records"),
            ],
        )
        .explained(ImportRefusedTotal),
        lines(
            "Found at the start",
            "ops",
            [PanelQuery::rate(RecoveredBlocksTotal, &["instance", "result"])],
        )
        .explained(RecoveredBlocksTotal),
        lines("Time to find them", "s", [PanelQuery::level(RecoverSeconds, instance)])
            .explained(RecoverSeconds),
    ]
}
