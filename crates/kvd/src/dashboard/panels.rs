//! The panels of the dashboard, row by row.

mod disk;
mod doors;
mod memory;
mod remote;

use super::query::{
    OF_DAEMON, PanelQuery, busy_seconds, legend, quantile_queries, rate, rate_where, selector,
    sum_level,
};
use super::threshold::{self, Threshold};
use crate::metrics::Metric;
use serde_json::{Value, json};

/// A titled group of panels.
pub(super) struct PanelRow {
    pub(super) title: &'static str,
    /// Height of each of its panels, in Grafana's units.
    pub(super) height: u32,
    pub(super) panels: Vec<DashboardPanel>,
}

/// One panel.
pub(super) struct DashboardPanel {
    pub(super) title: &'static str,
    /// Shown behind the panel's information sign.
    pub(super) description: String,
    pub(super) kind: PanelKind,
    /// One of Grafana's unit ids.
    pub(super) unit: &'static str,
    /// Width, of the grid's 24 columns.
    pub(super) width: u32,
    /// Top of the scale, where there is one.
    pub(super) max: Option<f64>,
    /// Colours by value, ascending.
    pub(super) thresholds: &'static [Threshold],
    /// Words that stand for values.
    pub(super) values: &'static [(&'static str, &'static str)],
    pub(super) queries: Vec<PanelQuery>,
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
    pub(super) fn type_name(self) -> &'static str {
        match self {
            Self::Lines => "timeseries",
            Self::Stat | Self::Names => "stat",
        }
    }

    pub(super) fn panel_options(self) -> Value {
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
pub(super) fn all_rows() -> Vec<PanelRow> {
    let row = |title, panels| PanelRow { title, height: 7, panels };
    vec![
        PanelRow { title: "At a glance", height: 4, panels: glance_panels() },
        row("Health", health_panels()),
        row("Requests", request_panels()),
        row("Device", [device_use(), device_speed()].into_iter().flatten().collect()),
        row("Compression", [held_panels(), encoding_panels()].into_iter().flatten().collect()),
        row("Pool", memory::pool_panels()),
        row("Cache", memory::cache_panels()),
        row("Disk", disk::disk_panels()),
        row("Shared store", remote::remote_panels()),
        row("Doors", doors::door_panels()),
    ]
}

fn lines<const N: usize>(
    title: &'static str,
    unit: &'static str,
    queries: [PanelQuery; N],
) -> DashboardPanel {
    DashboardPanel {
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

impl DashboardPanel {
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
fn refused_query() -> PanelQuery {
    let failed = rate_where(Metric::RequestsTotal, r#"code!="OK""#, &[]);
    let transport = rate(Metric::TransportRefusalsTotal, &[]);
    let expr = format!("({failed} or vector(0)) + ({transport} or vector(0))");
    PanelQuery::new(expr, "refused")
}

/// The answers first: what is saved, what it costs, how fast it goes.
fn glance_panels() -> Vec<DashboardPanel> {
    use Metric::{
        AttendedLogicalBytesTotal, CodecError, CompressionRatio, EncodedLogicalBytesTotal,
        HeldBytes, LoadedLogicalBytesTotal, LogicalBytes, PoolCapacityBytes, PoolUsedBytes,
        SavedBytes, StoredLogicalBytesTotal,
    };
    let one = |title, unit, expr: String| lines(title, unit, [PanelQuery::new(expr, "")]).stat();
    let ratio = format!("{} / ({} > 0)", sum_level(LogicalBytes, &[]), sum_level(HeldBytes, &[]));
    let used = format!("max({} / {})", selector(PoolUsedBytes), selector(PoolCapacityBytes));
    let error = format!("max({})", selector(CodecError));
    let speed = |title, metric| {
        one(title, "Bps", rate(metric, &[])).explained(metric).colored(threshold::MOVES).wide(6)
    };
    vec![
        one("Saved", "bytes", sum_level(SavedBytes, &[]))
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
        lines("Refusals", "reqps", [refused_query()])
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

fn health_panels() -> Vec<DashboardPanel> {
    use Metric::{BuildInfo, Connections, Models, OpenStreams, Ready, Sequences};
    let build = PanelQuery::new(
        selector(BuildInfo),
        "{{instance}}: kvd {{version}} ({{commit}}), {{device}}, boot {{boot_id}}",
    );
    let process = |expr: &str, name: &str| {
        let expr = expr.replace('?', &format!("{{{OF_DAEMON}}}"));
        PanelQuery::new(expr, &format!("{name} {{{{instance}}}}"))
    };
    let cpu = process("rate(process_cpu_seconds_total?[$__rate_interval])", "");
    let files = [process("process_open_fds?", "open"), process("process_max_fds?", "most")];
    vec![
        DashboardPanel {
            values: &[("0", "not ready"), ("1", "ready")],
            ..lines("Ready", "none", [PanelQuery::new(selector(Ready), "{{instance}}")])
                .stat()
                .explained(Ready)
                .colored(threshold::READY)
                .wide(4)
        },
        DashboardPanel {
            kind: PanelKind::Names,
            ..lines("Build", "none", [build]).explained(BuildInfo).wide(12)
        },
        lines("Up for", "s", [process("time() - process_start_time_seconds?", "")])
            .stat()
            .described("Seconds since the daemon started.")
            .wide(4),
        lines("Models", "none", [PanelQuery::level(Models, &[])]).stat().explained(Models).wide(4),
        lines("Open sequences", "none", [PanelQuery::level(Sequences, MODEL)]).explained(Sequences),
        lines("Connections", "none", [PanelQuery::level(Connections, &["instance", "listener"])])
            .explained(Connections),
        lines("Open streams", "none", [PanelQuery::level(OpenStreams, &["instance", "rpc"])])
            .explained(OpenStreams),
        lines("Resident memory", "bytes", [process("process_resident_memory_bytes?", "")])
            .described("Resident memory of the daemon."),
        lines("Processor time", "percentunit", [cpu])
            .described("Seconds of processor time per second; 100 % is one core."),
        lines("File descriptors", "none", files)
            .described("Open file descriptors, and how many the system allows."),
    ]
}

fn request_panels() -> Vec<DashboardPanel> {
    use Metric::{
        InflightBytes, RegionBytes, RegionCallsTotal, Regions, RequestSeconds, RequestsTotal,
        SessionEndsTotal, SessionSequencesClosedTotal, Sessions, TransportRefusalsTotal,
    };
    let refused = PanelQuery::rate_where(RequestsTotal, r#"code!="OK""#, &["rpc", "code"]);
    let region_calls = PanelQuery::rate(RegionCallsTotal, &["payloads"]);
    vec![
        lines("Requests by rpc", "reqps", [PanelQuery::rate(RequestsTotal, &["rpc"])])
            .explained(RequestsTotal),
        lines("Refusals by rpc and code", "reqps", [refused])
            .described("docs/operating.md says what each code means and what to do."),
        lines("Latency by rpc", "s", quantile_queries(RequestSeconds, &["rpc"], ""))
            .explained(RequestSeconds),
        lines("Refused by gRPC", "reqps", [PanelQuery::rate(TransportRefusalsTotal, &["reason"])])
            .explained(TransportRefusalsTotal)
            .wide(12),
        lines("Bytes in flight", "bytes", [PanelQuery::level(InflightBytes, &["instance"])])
            .explained(InflightBytes)
            .wide(12),
        lines("Regions", "none", [PanelQuery::level(Regions, &["instance"])]).explained(Regions),
        lines("Memory of regions", "bytes", [PanelQuery::level(RegionBytes, &["instance"])])
            .explained(RegionBytes),
        lines("Calls through regions", "reqps", [region_calls]).explained(RegionCallsTotal),
        lines("Sessions", "none", [PanelQuery::level(Sessions, &["instance"])]).explained(Sessions),
        lines("Ends of sessions", "ops", [PanelQuery::rate(SessionEndsTotal, &["reason"])])
            .explained(SessionEndsTotal),
        lines(
            "Sequences closed with sessions",
            "ops",
            [PanelQuery::rate(SessionSequencesClosedTotal, &["instance"])],
        )
        .explained(SessionSequencesClosedTotal),
    ]
}

fn device_use() -> Vec<DashboardPanel> {
    use Metric::{
        AbandonedJobsTotal, AttendSeconds, DeviceBusySecondsTotal, EncodeSeconds,
        GpuGraphChangesTotal, GpuLaunchesTotal, LoadSeconds, MergedAttendsTotal, QueueDepth,
        QueueSeconds, QueuedStreamMessages, SavedBlockPassesTotal, StoreSeconds,
    };
    const KIND: &[&str] = &["instance", "device", "kind"];
    let share = |metric, name: &str| {
        PanelQuery::new(busy_seconds(metric, DEVICE), &legend(DEVICE)).named(name)
    };
    let shares = [
        share(StoreSeconds, "store"),
        share(EncodeSeconds, "encode"),
        share(AttendSeconds, "attend"),
        share(LoadSeconds, "load"),
    ];
    let times = |title, metric| {
        lines(title, "s", quantile_queries(metric, DEVICE, "")).explained(metric).wide(6)
    };
    vec![
        lines("Queue", "none", [PanelQuery::level(QueueDepth, KIND)]).explained(QueueDepth),
        lines("Messages of streams in it", "none", [PanelQuery::level(QueuedStreamMessages, KIND)])
            .explained(QueuedStreamMessages),
        lines("Time in the queue", "s", quantile_queries(QueueSeconds, KIND, ""))
            .explained(QueueSeconds),
        lines(
            "Share of time the device is busy",
            "percentunit",
            [PanelQuery::rate(DeviceBusySecondsTotal, KIND)],
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
            [PanelQuery::rate(AbandonedJobsTotal, &["instance", "device", "when"])],
        )
        .explained(AbandonedJobsTotal)
        .wide(12),
        lines(
            "Attends merged",
            "ops",
            [PanelQuery::rate(MergedAttendsTotal, &["instance", "device"])],
        )
        .explained(MergedAttendsTotal),
        lines("Block passes saved", "ops", [PanelQuery::rate(SavedBlockPassesTotal, MODEL)])
            .explained(SavedBlockPassesTotal),
        times("Attend, device time", AttendSeconds),
        times("Store, device time", StoreSeconds),
        times("Encode, device time", EncodeSeconds),
        times("Load, device time", LoadSeconds),
        lines("GPU launches", "ops", [PanelQuery::rate(GpuLaunchesTotal, &["how"])])
            .explained(GpuLaunchesTotal),
        lines("GPU graph changes", "ops", [PanelQuery::rate(GpuGraphChangesTotal, &["change"])])
            .explained(GpuGraphChangesTotal),
    ]
}

fn device_speed() -> Vec<DashboardPanel> {
    use Metric::{
        AttendedLayerQueryTokensTotal, AttendedLogicalBytesTotal, AttendedStoredBytesTotal,
        LoadedLogicalBytesTotal, ModelDeviceJobsTotal, ModelDeviceSecondsTotal, ModelLayers,
        StoredLayerTokensTotal, StoredLogicalBytesTotal,
    };
    const WORK: &[&str] = &["namespace", "model", "codec", "work"];
    let attended = [
        PanelQuery::rate(AttendedStoredBytesTotal, MODEL).named("compressed"),
        PanelQuery::rate(AttendedLogicalBytesTotal, MODEL).named("logical"),
    ];
    let while_busy = [
        speed_query(AttendedStoredBytesTotal, "attend").named("compressed"),
        speed_query(AttendedLogicalBytesTotal, "attend").named("logical"),
    ];
    let moved = [
        PanelQuery::rate(StoredLogicalBytesTotal, MODEL).named("stored"),
        PanelQuery::rate(LoadedLogicalBytesTotal, MODEL).named("loaded"),
    ];
    let layers = format!("max by ({}) ({})", MODEL.join(", "), selector(ModelLayers));
    let tokens = |metric, name: &str| {
        let expr = format!("{} / {layers}", rate(metric, MODEL));
        PanelQuery::new(expr, &legend(MODEL)).named(name)
    };
    let tokens = [
        tokens(AttendedLayerQueryTokensTotal, "attended"),
        tokens(StoredLayerTokensTotal, "stored"),
    ];
    let seconds = PanelQuery::rate(ModelDeviceSecondsTotal, WORK);
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
        lines("Mean device time of a job", "s", [PanelQuery::new(mean, &legend(WORK))])
            .described("Device seconds of a model over its jobs, by work."),
    ]
}

fn held_panels() -> Vec<DashboardPanel> {
    use Metric::{
        CodecError, CodecRowError, CompressionRatio, ErrorBound, HeldBytes, LogicalBytes,
        ModelOnceBytes, ModelRegistered, PackedBytes, PackedBytesPerValue, PackedPartBytes,
        PackedValues, RawBytes, RawValues, SavedBytes, TableVersions,
    };
    let errors = [
        PanelQuery::largest(CodecError, MODEL_SIDE).named("error"),
        PanelQuery::largest(CodecRowError, MODEL_SIDE).named("error of rows"),
        PanelQuery::largest(ErrorBound, MODEL_SIDE).named("bound"),
    ];
    let values = [
        PanelQuery::level(PackedValues, MODEL).named("packed"),
        PanelQuery::level(RawValues, MODEL).named("raw"),
    ];
    let bytes = [
        PanelQuery::level(HeldBytes, MODEL).named("held"),
        PanelQuery::level(LogicalBytes, MODEL).named("logical"),
    ];
    let [packed, raw] = [PackedValues, RawValues].map(|metric| sum_level(metric, MODEL));
    let share = PanelQuery::new(format!("{packed} / ({packed} + {raw})"), &legend(MODEL));
    let bits = PanelQuery::largest(PackedBytesPerValue, MODEL);
    let bits = PanelQuery::new(format!("8 * {}", bits.expr), &bits.legend);
    let age = format!("time() - max by ({}) ({})", MODEL.join(", "), selector(ModelRegistered));
    vec![
        lines("Held and logical bytes", "bytes", bytes)
            .described("Bytes of K and V as they are held, and as they would be raw."),
        lines("Saved bytes", "bytes", [PanelQuery::level(SavedBytes, MODEL)]).explained(SavedBytes),
        lines("Smallest compression ratio", "none", [smallest_query(CompressionRatio)])
            .explained(CompressionRatio),
        lines("Bits per packed value", "none", [bits]).explained(PackedBytesPerValue),
        lines("Codec error and declared bound", "percentunit", errors).described(
            "Relative error of what attention sees of recently sampled blocks, that of their rows, \
             and the bound that the codec declares.",
        ),
        lines("Packed bytes by side", "bytes", [PanelQuery::level(PackedBytes, MODEL_SIDE)])
            .explained(PackedBytes),
        lines("Packed bytes by part", "bytes", [PanelQuery::level(PackedPartBytes, &["part"])])
            .explained(PackedPartBytes),
        lines("Window bytes", "bytes", [PanelQuery::level(RawBytes, MODEL)]).explained(RawBytes),
        lines("Values held", "short", values)
            .described("K and V values in packed blocks, and in windows and open blocks."),
        lines("Share of values packed", "percentunit", [share])
            .described("Values in packed blocks over all values held.")
            .up_to(1.0),
        lines("Held once per model", "bytes", [PanelQuery::level(ModelOnceBytes, MODEL_PART)])
            .explained(ModelOnceBytes),
        lines("Huffman table versions", "none", [PanelQuery::largest(TableVersions, MODEL)])
            .explained(TableVersions),
        lines("Registered for", "s", [PanelQuery::new(age, &legend(MODEL))])
            .described("Seconds since a model was registered."),
    ]
}

/// A ratio, the worst daemon's.
fn smallest_query(metric: Metric) -> PanelQuery {
    let expr = format!("min by ({}) ({})", MODEL.join(", "), selector(metric));
    PanelQuery::new(expr, &legend(MODEL))
}

fn encoding_panels() -> Vec<DashboardPanel> {
    use Metric::{
        EncodedLayerBlocksTotal, EncodedLogicalBytesTotal, EncodedPageBytesTotal,
        FallbackPagesTotal, OverBoundPagesTotal, PackDeferredTotal, SampledBlocksTotal,
    };
    let encoded = [
        PanelQuery::rate(EncodedLogicalBytesTotal, MODEL).named("logical"),
        PanelQuery::rate(EncodedPageBytesTotal, MODEL).named("pages"),
    ];
    let while_busy = [
        speed_query(EncodedLogicalBytesTotal, "encode").named("logical"),
        speed_query(EncodedPageBytesTotal, "encode").named("pages"),
    ];
    let outcomes = [
        PanelQuery::rate(EncodedLayerBlocksTotal, MODEL).named("blocks encoded"),
        PanelQuery::rate(PackDeferredTotal, MODEL).named("blocks deferred"),
        PanelQuery::rate(FallbackPagesTotal, MODEL).named("pages kept raw"),
    ];
    let contract = [
        PanelQuery::rate(SampledBlocksTotal, MODEL).named("blocks measured"),
        PanelQuery::rate(OverBoundPagesTotal, MODEL_SIDE).named("pages over their bound"),
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
fn speed_query(bytes: Metric, work: &str) -> PanelQuery {
    let work = format!("work=\"{work}\"");
    let seconds = rate_where(Metric::ModelDeviceSecondsTotal, &work, MODEL);
    let expr = format!("{} / {seconds}", rate(bytes, MODEL));
    PanelQuery::new(expr, &legend(MODEL))
}
