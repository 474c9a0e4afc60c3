//! What the dashboard shows, row by row.

use super::query::{OF_DAEMON, Query, busy, legend, quantiles, rate, rate_where, selector, total};
use super::threshold::{self, Threshold};
use crate::metrics::Metric;
use serde_json::{Value, json};

/// A titled group of panels.
pub(super) struct Row {
    pub(super) title: &'static str,
    /// Of each of its panels, in Grafana's units.
    pub(super) height: u32,
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
    /// Colours by value, ascending.
    pub(super) thresholds: &'static [Threshold],
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
            Self::Stat => {
                json!({ "reduceOptions": last, "textMode": "auto", "colorMode": "background" })
            }
            Self::Names => json!({ "reduceOptions": last, "textMode": "name" }),
        }
    }
}

/// A model's name is its namespace's: only together do they tell models apart.
const MODEL: &[&str] = &["namespace", "model", "codec"];
const MODEL_SIDE: &[&str] = &["namespace", "model", "codec", "side"];
const DEVICE: &[&str] = &["instance", "device"];
const MODEL_PART: &[&str] = &["namespace", "model", "codec", "part"];

/// All rows, top to bottom.
pub(super) fn rows() -> Vec<Row> {
    let row = |title, panels| Row { title, height: 7, panels };
    vec![
        Row { title: "At a glance", height: 4, panels: glance() },
        row("Health", health()),
        row("Requests", requests()),
        row("Device", [device_use(), device_speed()].into_iter().flatten().collect()),
        row("Compression", [held(), encoding()].into_iter().flatten().collect()),
        row("Pool", pool()),
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
        thresholds: &[],
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

    fn colored(self, thresholds: &'static [Threshold]) -> Self {
        Self { thresholds, ..self }
    }
}

/// Calls that did not end well, refusals of gRPC itself included.
fn refused() -> Query {
    let failed = rate_where(Metric::RequestsTotal, r#"code!="OK""#, &[]);
    let transport = rate(Metric::TransportRefusalsTotal, &[]);
    let expr = format!("({failed} or vector(0)) + ({transport} or vector(0))");
    Query::new(expr, "refused")
}

/// The answers first: what is saved, what it costs, how fast it goes.
fn glance() -> Vec<Panel> {
    use Metric::{
        AttendedLogicalBytesTotal, CodecError, CompressionRatio, EncodedLogicalBytesTotal,
        HeldBytes, LoadedLogicalBytesTotal, LogicalBytes, PoolCapacityBytes, PoolUsedBytes,
        SavedBytes, StoredLogicalBytesTotal,
    };
    let one = |title, unit, expr: String| lines(title, unit, [Query::new(expr, "")]).stat();
    let ratio = format!("{} / ({} > 0)", total(LogicalBytes, &[]), total(HeldBytes, &[]));
    let used = format!("max({} / {})", selector(PoolUsedBytes), selector(PoolCapacityBytes));
    let error = format!("max({})", selector(CodecError));
    let speed = |title, metric| {
        one(title, "Bps", rate(metric, &[])).explained(metric).colored(threshold::MOVES).wide(6)
    };
    vec![
        one("Saved", "bytes", total(SavedBytes, &[]))
            .explained(SavedBytes)
            .colored(threshold::SAVES)
            .wide(5),
        one("Compression ratio", "none", ratio)
            .explained(CompressionRatio)
            .colored(threshold::RATIO)
            .wide(5),
        one("Fullest pool", "percentunit", used)
            .described("Used over capacity, of the fullest device. Stores are refused at 100 %.")
            .colored(threshold::POOL)
            .wide(5),
        lines("Refusals", "reqps", [refused()])
            .stat()
            .described("Calls that ended with an error, and what gRPC itself refused.")
            .colored(threshold::REFUSALS)
            .wide(5),
        one("Largest codec error", "percentunit", error)
            .described(
                "Error of rows, of the worst model and side: relative, root-mean-square, of \
                 recently sampled blocks. Answers of attention are off by less.",
            )
            .colored(threshold::ERRORS)
            .wide(4),
        speed("Store", StoredLogicalBytesTotal),
        speed("Encode", EncodedLogicalBytesTotal),
        speed("Attend", AttendedLogicalBytesTotal),
        speed("Load", LoadedLogicalBytesTotal),
    ]
}

fn health() -> Vec<Panel> {
    use Metric::{BuildInfo, Connections, Models, OpenStreams, Ready, Sequences};
    let build = Query::new(
        selector(BuildInfo),
        "{{instance}}: kvd {{version}} ({{commit}}), {{device}}, boot {{boot_id}}",
    );
    let process = |expr: &str, name: &str| {
        let expr = expr.replace('?', &format!("{{{OF_DAEMON}}}"));
        Query::new(expr, &format!("{name} {{{{instance}}}}"))
    };
    let cpu = process("rate(process_cpu_seconds_total?[$__rate_interval])", "");
    let files = [process("process_open_fds?", "open"), process("process_max_fds?", "most")];
    vec![
        Panel {
            values: &[("0", "not ready"), ("1", "ready")],
            ..lines("Ready", "none", [Query::new(selector(Ready), "{{instance}}")])
                .stat()
                .explained(Ready)
                .colored(threshold::READY)
                .wide(4)
        },
        Panel {
            kind: PanelKind::Names,
            ..lines("Build", "none", [build]).explained(BuildInfo).wide(12)
        },
        lines("Up for", "s", [process("time() - process_start_time_seconds?", "")])
            .stat()
            .described("Seconds since the daemon started.")
            .wide(4),
        lines("Models", "none", [Query::level(Models, &[])]).stat().explained(Models).wide(4),
        lines("Open sequences", "none", [Query::level(Sequences, MODEL)]).explained(Sequences),
        lines("Connections", "none", [Query::level(Connections, &["instance", "listener"])])
            .explained(Connections),
        lines("Open streams", "none", [Query::level(OpenStreams, &["instance", "rpc"])])
            .explained(OpenStreams),
        lines("Resident memory", "bytes", [process("process_resident_memory_bytes?", "")])
            .described("Resident memory of the daemon."),
        lines("Processor time", "percentunit", [cpu])
            .described("Seconds of processor time per second; 100 % is one core."),
        lines("File descriptors", "none", files)
            .described("Open file descriptors, and how many the system allows."),
    ]
}

fn requests() -> Vec<Panel> {
    use Metric::{
        InflightBytes, RegionBytes, RegionCallsTotal, Regions, RequestSeconds, RequestsTotal,
        SessionEndsTotal, SessionSequencesClosedTotal, Sessions, TransportRefusalsTotal,
    };
    let refused = Query::rate_where(RequestsTotal, r#"code!="OK""#, &["rpc", "code"]);
    vec![
        lines("Requests by rpc", "reqps", [Query::rate(RequestsTotal, &["rpc"])])
            .explained(RequestsTotal),
        lines("Refusals by rpc and code", "reqps", [refused])
            .described("docs/operating.md says what each code means and what to do."),
        lines("Latency by rpc", "s", quantiles(RequestSeconds, &["rpc"], ""))
            .explained(RequestSeconds),
        lines("Refused by gRPC", "reqps", [Query::rate(TransportRefusalsTotal, &["reason"])])
            .explained(TransportRefusalsTotal)
            .wide(12),
        lines("Bytes in flight", "bytes", [Query::level(InflightBytes, &["instance"])])
            .explained(InflightBytes)
            .wide(12),
        lines("Regions", "none", [Query::level(Regions, &["instance"])]).explained(Regions),
        lines("Memory of regions", "bytes", [Query::level(RegionBytes, &["instance"])])
            .explained(RegionBytes),
        lines("Calls through regions", "reqps", [Query::rate(RegionCallsTotal, &["payloads"])])
            .explained(RegionCallsTotal),
        lines("Sessions", "none", [Query::level(Sessions, &["instance"])]).explained(Sessions),
        lines("Ends of sessions", "ops", [Query::rate(SessionEndsTotal, &["reason"])])
            .explained(SessionEndsTotal),
        lines(
            "Sequences closed with sessions",
            "ops",
            [Query::rate(SessionSequencesClosedTotal, &["instance"])],
        )
        .explained(SessionSequencesClosedTotal),
    ]
}

fn device_use() -> Vec<Panel> {
    use Metric::{
        AbandonedJobsTotal, AttendSeconds, DeviceBusySecondsTotal, EncodeSeconds,
        GpuGraphChangesTotal, GpuLaunchesTotal, LoadSeconds, QueueDepth, QueueSeconds,
        QueuedStreamMessages, StoreSeconds,
    };
    const KIND: &[&str] = &["instance", "device", "kind"];
    let share = |metric, name: &str| Query::new(busy(metric, DEVICE), &legend(DEVICE)).named(name);
    let shares = [
        share(StoreSeconds, "store"),
        share(EncodeSeconds, "encode"),
        share(AttendSeconds, "attend"),
        share(LoadSeconds, "load"),
    ];
    let times =
        |title, metric| lines(title, "s", quantiles(metric, DEVICE, "")).explained(metric).wide(6);
    vec![
        lines("Queue", "none", [Query::level(QueueDepth, KIND)]).explained(QueueDepth),
        lines("Messages of streams in it", "none", [Query::level(QueuedStreamMessages, KIND)])
            .explained(QueuedStreamMessages),
        lines("Time in the queue", "s", quantiles(QueueSeconds, KIND, "")).explained(QueueSeconds),
        lines(
            "Share of time the device is busy",
            "percentunit",
            [Query::rate(DeviceBusySecondsTotal, KIND)],
        )
        .explained(DeviceBusySecondsTotal)
        .up_to(1.0),
        lines("Share of time by work", "percentunit", shares)
            .described("Device time per second; what store takes includes what encode takes.")
            .wide(12)
            .up_to(1.0),
        lines(
            "Jobs nobody waits for",
            "ops",
            [Query::rate(AbandonedJobsTotal, &["instance", "device", "when"])],
        )
        .explained(AbandonedJobsTotal)
        .wide(12),
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
        AttendedLayerQueryTokensTotal, AttendedLogicalBytesTotal, AttendedStoredBytesTotal,
        LoadedLogicalBytesTotal, ModelDeviceJobsTotal, ModelDeviceSecondsTotal, ModelLayers,
        StoredLayerTokensTotal, StoredLogicalBytesTotal,
    };
    const WORK: &[&str] = &["namespace", "model", "codec", "work"];
    let attended = [
        Query::rate(AttendedStoredBytesTotal, MODEL).named("compressed"),
        Query::rate(AttendedLogicalBytesTotal, MODEL).named("logical"),
    ];
    let while_busy = [
        speed(AttendedStoredBytesTotal, "attend").named("compressed"),
        speed(AttendedLogicalBytesTotal, "attend").named("logical"),
    ];
    let moved = [
        Query::rate(StoredLogicalBytesTotal, MODEL).named("stored"),
        Query::rate(LoadedLogicalBytesTotal, MODEL).named("loaded"),
    ];
    let layers = format!("max by ({}) ({})", MODEL.join(", "), selector(ModelLayers));
    let tokens = |metric, name: &str| {
        let expr = format!("{} / {layers}", rate(metric, MODEL));
        Query::new(expr, &legend(MODEL)).named(name)
    };
    let tokens = [
        tokens(AttendedLayerQueryTokensTotal, "attended"),
        tokens(StoredLayerTokensTotal, "stored"),
    ];
    let seconds = Query::rate(ModelDeviceSecondsTotal, WORK);
    let mean =
        format!("{} / {}", rate(ModelDeviceSecondsTotal, WORK), rate(ModelDeviceJobsTotal, WORK));
    vec![
        lines("Attended bytes", "Bps", attended).described(
            "Bytes that attend batches name, as they are held and as they would be raw.",
        ),
        lines("Attend speed while it works", "Bps", while_busy)
            .described("Bytes attended over the device seconds spent on it."),
        lines("Stored and loaded bytes", "Bps", moved)
            .described("K and V that came and went, in the stored precision."),
        lines("Tokens", "ops", tokens)
            .described("Query tokens answered and tokens stored: counts by layer over the layers."),
        lines("Device time of models", "percentunit", [seconds]).explained(ModelDeviceSecondsTotal),
        lines("Mean device time of a job", "s", [Query::new(mean, &legend(WORK))])
            .described("Device seconds of a model over its jobs, by work."),
    ]
}

fn held() -> Vec<Panel> {
    use Metric::{
        CodecError, CodecRowError, CompressionRatio, ErrorBound, HeldBytes, LogicalBytes,
        ModelOnceBytes, ModelRegistered, PackedBytes, PackedBytesPerValue, PackedPartBytes,
        PackedValues, RawBytes, RawValues, SavedBytes, TableVersions,
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
    let bytes = [
        Query::level(HeldBytes, MODEL).named("held"),
        Query::level(LogicalBytes, MODEL).named("logical"),
    ];
    let [packed, raw] = [PackedValues, RawValues].map(|metric| total(metric, MODEL));
    let share = Query::new(format!("{packed} / ({packed} + {raw})"), &legend(MODEL));
    let bits = Query::largest(PackedBytesPerValue, MODEL);
    let bits = Query::new(format!("8 * {}", bits.expr), &bits.legend);
    let age = format!("time() - max by ({}) ({})", MODEL.join(", "), selector(ModelRegistered));
    vec![
        lines("Held and logical bytes", "bytes", bytes)
            .described("Bytes of K and V as they are held, and as they would be raw."),
        lines("Saved bytes", "bytes", [Query::level(SavedBytes, MODEL)]).explained(SavedBytes),
        lines("Smallest compression ratio", "none", [smallest(CompressionRatio)])
            .explained(CompressionRatio),
        lines("Bits per packed value", "none", [bits]).explained(PackedBytesPerValue),
        lines("Codec error and declared bound", "percentunit", errors).described(
            "Relative error of what attention sees of recently sampled blocks, that of their rows, \
             and the bound that the codec declares.",
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
        lines("Held once per model", "bytes", [Query::level(ModelOnceBytes, MODEL_PART)])
            .explained(ModelOnceBytes),
        lines("Huffman table versions", "none", [Query::largest(TableVersions, MODEL)])
            .explained(TableVersions),
        lines("Registered for", "s", [Query::new(age, &legend(MODEL))])
            .described("Seconds since a model was registered."),
    ]
}

/// A ratio, the worst daemon's.
fn smallest(metric: Metric) -> Query {
    let expr = format!("min by ({}) ({})", MODEL.join(", "), selector(metric));
    Query::new(expr, &legend(MODEL))
}

fn encoding() -> Vec<Panel> {
    use Metric::{
        EncodedLayerBlocksTotal, EncodedLogicalBytesTotal, EncodedPageBytesTotal,
        FallbackPagesTotal, OverBoundPagesTotal, PackDeferredTotal, SampledBlocksTotal,
    };
    let encoded = [
        Query::rate(EncodedLogicalBytesTotal, MODEL).named("logical"),
        Query::rate(EncodedPageBytesTotal, MODEL).named("pages"),
    ];
    let while_busy = [
        speed(EncodedLogicalBytesTotal, "encode").named("logical"),
        speed(EncodedPageBytesTotal, "encode").named("pages"),
    ];
    let outcomes = [
        Query::rate(EncodedLayerBlocksTotal, MODEL).named("blocks encoded"),
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

/// Bytes of a counter over the device seconds of that work, by model.
fn speed(bytes: Metric, work: &str) -> Query {
    let work = format!("work=\"{work}\"");
    let seconds = rate_where(Metric::ModelDeviceSecondsTotal, &work, MODEL);
    let expr = format!("{} / {seconds}", rate(bytes, MODEL));
    Query::new(expr, &legend(MODEL))
}

fn pool() -> Vec<Panel> {
    use Metric::{PoolCapacityBytes, PoolLargestFreeBytes, PoolSlots, PoolUsedBytes};
    const TIER: &[&str] = &["instance", "device", "tier"];
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
        lines("Pool use", "percentunit", [Query::new(used, &legend(TIER))])
            .described("Used over capacity, by device.")
            .colored(threshold::POOL)
            .up_to(1.0)
            .wide(6),
        lines("Slots", "none", [Query::level(PoolSlots, TIER)]).explained(PoolSlots).wide(6),
    ]
}
