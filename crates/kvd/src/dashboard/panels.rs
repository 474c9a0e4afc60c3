//! What the dashboard shows, row by row.

use super::query::{Query, busy, legend, quantiles, rate, selector, total};
use crate::metrics::Metric;
use serde_json::{Value, json};

/// A titled group of panels.
pub(super) struct Row {
    pub(super) title: &'static str,
    pub(super) panels: Vec<Panel>,
}

/// One panel.
pub(super) struct Panel {
    pub(super) title: &'static str,
    /// Shown behind the panel's information sign.
    pub(super) description: String,
    pub(super) kind: PanelKind,
    /// Of Grafana's unit ids.
    pub(super) unit: &'static str,
    /// Of the grid's 24 columns.
    pub(super) width: u32,
    /// Top of the scale, where there is one.
    pub(super) max: Option<f64>,
    /// Words that stand for values.
    pub(super) values: &'static [(&'static str, &'static str)],
    pub(super) queries: Vec<Query>,
}

/// How a panel draws.
#[derive(Clone, Copy)]
pub(super) enum PanelKind {
    /// Curves over time.
    Lines,
    /// The last value, large.
    Stat,
    /// The labels of an info metric.
    Names,
}

impl PanelKind {
    /// Grafana's panel type.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Lines => "timeseries",
            Self::Stat | Self::Names => "stat",
        }
    }

    pub(super) fn options(self) -> Value {
        let last = json!({ "calcs": ["lastNotNull"], "fields": "", "values": false });
        match self {
            Self::Lines => json!({
                "legend": { "displayMode": "list", "placement": "bottom", "showLegend": true },
                "tooltip": { "mode": "multi", "sort": "desc" },
            }),
            Self::Stat => json!({ "reduceOptions": last, "textMode": "auto" }),
            Self::Names => json!({ "reduceOptions": last, "textMode": "name" }),
        }
    }
}

/// A model's name is its namespace's: only together do they tell models apart.
const MODEL: &[&str] = &["namespace", "model", "codec"];
const MODEL_SIDE: &[&str] = &["namespace", "model", "codec", "side"];
const MODEL_PART: &[&str] = &["namespace", "model", "codec", "part"];

/// All rows, top to bottom.
pub(super) fn rows() -> Vec<Row> {
    vec![
        Row { title: "Health", panels: health() },
        Row { title: "Requests", panels: requests() },
        Row {
            title: "Device",
            panels: [device_use(), device_speed()].into_iter().flatten().collect(),
        },
        Row { title: "Compression", panels: [held(), encoding()].into_iter().flatten().collect() },
        Row { title: "Pool", panels: pool() },
    ]
}

fn lines<const N: usize>(title: &'static str, unit: &'static str, queries: [Query; N]) -> Panel {
    Panel {
        title,
        description: String::new(),
        kind: PanelKind::Lines,
        unit,
        width: 8,
        max: None,
        values: &[],
        queries: queries.into(),
    }
}

impl Panel {
    /// Explains the panel by a metric's own help text.
    fn explained(self, metric: Metric) -> Self {
        self.described(metric.help())
    }

    fn described(self, text: &str) -> Self {
        Self { description: text.to_owned(), ..self }
    }

    fn wide(self, width: u32) -> Self {
        Self { width, ..self }
    }

    fn up_to(self, max: f64) -> Self {
        Self { max: Some(max), ..self }
    }

    fn stat(self) -> Self {
        Self { kind: PanelKind::Stat, ..self }
    }
}

fn health() -> Vec<Panel> {
    use Metric::{BuildInfo, Models, Ready, RequestsTotal, ResidentBytes, Sequences};
    let build = Query::new(
        selector(BuildInfo),
        "{{instance}}: kvd {{version}}, {{device}}, boot {{boot_id}}",
    );
    let failed = format!(
        r#"sum(rate({}{{instance=~"$instance",code!="OK"}}[$__rate_interval])) or vector(0)"#,
        RequestsTotal.name()
    );
    vec![
        Panel {
            values: &[("0", "not ready"), ("1", "ready")],
            ..lines("Ready", "none", [Query::new(selector(Ready), "{{instance}}")])
                .stat()
                .explained(Ready)
                .wide(4)
        },
        Panel {
            kind: PanelKind::Names,
            ..lines("Build", "none", [build]).explained(BuildInfo).wide(12)
        },
        lines("Failed requests", "reqps", [Query::new(failed, "failed")]).stat().wide(4),
        lines("Models", "none", [Query::level(Models, &[])]).stat().explained(Models).wide(4),
        lines("Open sequences", "none", [Query::level(Sequences, MODEL)])
            .explained(Sequences)
            .wide(12),
        lines("Resident memory", "bytes", [Query::level(ResidentBytes, &["instance"])])
            .explained(ResidentBytes)
            .wide(12),
    ]
}

fn requests() -> Vec<Panel> {
    use Metric::{RegionBytes, RegionCallsTotal, Regions, RequestSeconds, RequestsTotal};
    let refused = format!(
        r#"sum by (rpc, code) (rate({}{{instance=~"$instance",code!="OK"}}[$__rate_interval]))"#,
        RequestsTotal.name()
    );
    vec![
        lines("Requests by rpc", "reqps", [Query::rate(RequestsTotal, &["rpc"])])
            .explained(RequestsTotal),
        lines("Refusals by rpc and code", "reqps", [Query::new(refused, "{{rpc}} {{code}}")])
            .described("docs/operating.md says what each code means and what to do."),
        lines("Latency by rpc", "s", quantiles(RequestSeconds, &["rpc"], ""))
            .explained(RequestSeconds),
        lines("Regions", "none", [Query::level(Regions, &["instance"])]).explained(Regions).wide(8),
        lines("Memory of regions", "bytes", [Query::level(RegionBytes, &["instance"])])
            .explained(RegionBytes)
            .wide(8),
        lines("Calls through regions", "reqps", [Query::rate(RegionCallsTotal, &["payloads"])])
            .explained(RegionCallsTotal)
            .wide(8),
    ]
}

fn device_use() -> Vec<Panel> {
    use Metric::{
        AttendSeconds, EncodeSeconds, GpuGraphChangesTotal, GpuLaunchesTotal, LoadSeconds,
        QueueDepth, QueueSeconds, StoreSeconds,
    };
    let share = |metric, name: &str| {
        Query::new(busy(metric, &["instance"]), &format!("{name} {{{{instance}}}}"))
    };
    let shares = [
        share(StoreSeconds, "store"),
        share(EncodeSeconds, "encode"),
        share(AttendSeconds, "attend"),
        share(LoadSeconds, "load"),
    ];
    let of_device = "Device time per second; what store takes includes what encode takes.";
    let times =
        |title, metric| lines(title, "s", quantiles(metric, MODEL, "")).explained(metric).wide(6);
    vec![
        lines("Queue", "none", [Query::level(QueueDepth, &["instance"])]).explained(QueueDepth),
        lines("Time in the queue", "s", quantiles(QueueSeconds, &["instance"], ""))
            .explained(QueueSeconds),
        lines("Share of time the device works", "percentunit", shares)
            .described(of_device)
            .up_to(1.0),
        times("Attend, device time", AttendSeconds),
        times("Store, device time", StoreSeconds),
        times("Encode, device time", EncodeSeconds),
        times("Load, device time", LoadSeconds),
        lines("GPU launches", "ops", [Query::rate(GpuLaunchesTotal, &["how"])])
            .explained(GpuLaunchesTotal),
        lines("GPU graph changes", "ops", [Query::rate(GpuGraphChangesTotal, &["change"])])
            .explained(GpuGraphChangesTotal),
    ]
}

fn device_speed() -> Vec<Panel> {
    use Metric::{
        AttendSeconds, AttendedLogicalBytesTotal, AttendedQueryTokensTotal,
        AttendedStoredBytesTotal, StoredTokensTotal,
    };
    let attended = [
        Query::rate(AttendedStoredBytesTotal, MODEL).named("compressed"),
        Query::rate(AttendedLogicalBytesTotal, MODEL).named("logical"),
    ];
    let while_busy = [
        speed(AttendedStoredBytesTotal, AttendSeconds).named("compressed"),
        speed(AttendedLogicalBytesTotal, AttendSeconds).named("logical"),
    ];
    let tokens = [
        Query::rate(AttendedQueryTokensTotal, MODEL).named("attended"),
        Query::rate(StoredTokensTotal, MODEL).named("stored"),
    ];
    vec![
        lines("Attended bytes", "Bps", attended).described(
            "Bytes that attend batches name, as they are held and as they would be raw.",
        ),
        lines("Attend speed while it works", "Bps", while_busy)
            .described("Bytes attended over the device seconds spent on it."),
        lines("Tokens", "ops", tokens)
            .described("Query tokens answered and tokens stored, each counted once per layer."),
    ]
}

fn held() -> Vec<Panel> {
    use Metric::{
        BitsPerValue, CodecError, CodecRowError, CompressionRatio, ErrorBound, ModelOnceBytes,
        PackedBytes, PackedPartBytes, PackedValues, RawBytes, RawValues, TableVersions,
    };
    let errors = [
        Query::largest(CodecError, MODEL_SIDE).named("error"),
        Query::largest(CodecRowError, MODEL_SIDE).named("error of rows"),
        Query::largest(ErrorBound, MODEL_SIDE).named("bound"),
    ];
    let values = [
        Query::level(PackedValues, MODEL).named("packed"),
        Query::level(RawValues, MODEL).named("raw"),
    ];
    let [packed, raw] = [PackedValues, RawValues].map(|metric| total(metric, MODEL));
    let share = Query::new(format!("{packed} / ({packed} + {raw})"), &legend(MODEL));
    let once = Query::level(ModelOnceBytes, MODEL_PART);
    vec![
        lines("Compression ratio", "none", [Query::largest(CompressionRatio, MODEL)])
            .explained(CompressionRatio),
        lines("Bits per packed value", "none", [Query::largest(BitsPerValue, MODEL)])
            .explained(BitsPerValue),
        lines("Codec error and declared bound", "percentunit", errors).described(
            "Relative error of what attention sees of recently sampled blocks, that of their rows, \
             and the bound that the codec declares; 0 without one.",
        ),
        lines("Packed bytes by side", "bytes", [Query::level(PackedBytes, MODEL_SIDE)])
            .explained(PackedBytes),
        lines("Packed bytes by part", "bytes", [Query::level(PackedPartBytes, &["part"])])
            .explained(PackedPartBytes),
        lines("Window bytes", "bytes", [Query::level(RawBytes, MODEL)]).explained(RawBytes),
        lines("Values held", "short", values)
            .described("K and V values in packed blocks, and in windows and open blocks."),
        lines("Share of values packed", "percentunit", [share])
            .described("Values in packed blocks over all values held.")
            .up_to(1.0),
        lines("Held once per model", "bytes", [once]).explained(ModelOnceBytes),
        lines("Huffman table versions", "none", [Query::largest(TableVersions, MODEL)])
            .explained(TableVersions),
    ]
}

fn encoding() -> Vec<Panel> {
    use Metric::{
        EncodeSeconds, EncodedBlocksTotal, EncodedLogicalBytesTotal, EncodedPageBytesTotal,
        FallbackPagesTotal, OverBoundPagesTotal, PackDeferredTotal, SampledBlocksTotal,
    };
    let encoded = [
        Query::rate(EncodedLogicalBytesTotal, MODEL).named("logical"),
        Query::rate(EncodedPageBytesTotal, MODEL).named("pages"),
    ];
    let while_busy = [
        speed(EncodedLogicalBytesTotal, EncodeSeconds).named("logical"),
        speed(EncodedPageBytesTotal, EncodeSeconds).named("pages"),
    ];
    let outcomes = [
        Query::rate(EncodedBlocksTotal, MODEL).named("blocks encoded"),
        Query::rate(PackDeferredTotal, MODEL).named("blocks deferred"),
        Query::rate(FallbackPagesTotal, MODEL).named("pages kept raw"),
    ];
    let contract = [
        Query::rate(SampledBlocksTotal, MODEL).named("blocks measured"),
        Query::rate(OverBoundPagesTotal, MODEL_SIDE).named("pages over their bound"),
    ];
    vec![
        lines("Encoded bytes", "Bps", encoded)
            .described("K and V that went into encoding, and the pages that came out."),
        lines("Encode speed while it works", "Bps", while_busy)
            .described("Bytes encoded over the device seconds spent on it."),
        lines("Blocks encoded, deferred, and pages kept raw", "ops", outcomes)
            .described("Deferred: no room in the pool. Kept raw: values the codec cannot take."),
        lines("Blocks measured, and pages over their bound", "ops", contract).described(
            "A page over the error bound that its codec declares is kept with a safer side.",
        ),
    ]
}

/// Bytes of a counter over the seconds of a histogram, by model.
fn speed(bytes: Metric, seconds: Metric) -> Query {
    let expr = format!("{} / {}", rate(bytes, MODEL), busy(seconds, MODEL));
    Query::new(expr, &legend(MODEL))
}

fn pool() -> Vec<Panel> {
    use Metric::{PoolCapacityBytes, PoolLargestFreeBytes, PoolSlots, PoolUsedBytes};
    const TIER: &[&str] = &["instance", "tier"];
    let used = format!("{} / {}", total(PoolUsedBytes, TIER), total(PoolCapacityBytes, TIER));
    vec![
        lines(
            "Pool",
            "bytes",
            [
                Query::level(PoolUsedBytes, TIER).named("used"),
                Query::level(PoolCapacityBytes, TIER).named("capacity"),
                Query::level(PoolLargestFreeBytes, TIER).named("largest free"),
            ],
        )
        .described("A small largest free range with much free memory in all is fragmentation.")
        .wide(12),
        lines("Pool use", "percentunit", [Query::new(used, "{{instance}} {{tier}}")])
            .described("Used over capacity.")
            .up_to(1.0)
            .wide(6),
        lines("Slots", "none", [Query::level(PoolSlots, TIER)]).explained(PoolSlots).wide(6),
    ]
}
