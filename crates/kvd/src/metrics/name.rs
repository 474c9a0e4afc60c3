//! The names: one variant per metric, its kind and its help text in one table.

/// What Prometheus calls the type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// A level.
    Gauge,
    /// A distribution.
    Histogram,
}

macro_rules! metrics {
    ($($variant:ident = $name:literal, $kind:ident, $help:literal;)*) => {
        /// Every metric that kvd exports.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Metric {
            $(#[doc = $help] $variant,)*
        }

        impl Metric {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// Name in the exposition.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Type in the exposition.
            #[must_use]
            pub const fn kind(self) -> Kind {
                match self { $(Self::$variant => Kind::$kind,)* }
            }

            /// What it says.
            #[must_use]
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)* }
            }
        }
    };
}

metrics! {
    BuildInfo = "kvd_build_info", Gauge, "1, with version, commit, boot_id and device as labels.";
    Ready = "kvd_ready", Gauge, "1 while requests are served, 0 while draining or failed.";
    ResidentBytes = "kvd_process_resident_bytes", Gauge, "Resident memory of the daemon.";

    RequestsTotal = "kvd_requests_total", Counter, "Finished calls, and messages of streams, by rpc and code.";
    RequestSeconds = "kvd_request_seconds", Histogram, "Time from receipt to answer, by rpc.";

    Regions = "kvd_regions", Gauge, "Regions that workers share with the daemon.";
    RegionBytes = "kvd_region_bytes", Gauge, "Bytes of their memory files.";

    RegionCallsTotal = "kvd_region_calls_total", Counter, "Calls through regions, by where their payloads were: a memory file, device memory in place, or device memory copied through the host.";

    QueueDepth = "kvd_queue_depth", Gauge, "Jobs waiting for the device.";
    QueueSeconds = "kvd_queue_seconds", Histogram, "Time a job waited for the device.";
    StoreSeconds = "kvd_store_seconds", Histogram, "Device time of one stored range, encoding included.";
    EncodeSeconds = "kvd_encode_seconds", Histogram, "Device time to encode the blocks that left the window in one store.";
    GpuLaunchesTotal = "kvd_gpu_launches_total", Counter, "Attention launches on GPUs, by how: kernels one by one, graphs of several.";
    GpuGraphChangesTotal = "kvd_gpu_graph_changes_total", Counter, "What was done to graphs before they were launched, by change: graphs made, nodes of graphs changed.";
    AttendSeconds = "kvd_attend_seconds", Histogram, "Device time of one attend batch.";
    LoadSeconds = "kvd_load_seconds", Histogram, "Device time of one load.";

    StoredTokensTotal = "kvd_stored_tokens_total", Counter, "Tokens stored, counted once per layer.";
    EncodedLogicalBytesTotal = "kvd_encoded_logical_bytes_total", Counter, "Bytes of K and V, in the stored precision, that were encoded.";
    EncodedPageBytesTotal = "kvd_encoded_page_bytes_total", Counter, "Bytes of the pages that came out of encoding.";
    EncodedBlocksTotal = "kvd_encoded_blocks_total", Counter, "Blocks encoded, counted once per layer.";
    PackDeferredTotal = "kvd_pack_deferred_total", Counter, "Blocks that stayed raw for now because the pool had no room for their pages.";
    FallbackPagesTotal = "kvd_fallback_pages_total", Counter, "Pages that could not be quantized and were kept raw.";
    SampledBlocksTotal = "kvd_sampled_blocks_total", Counter, "Blocks decoded again after encoding to measure their error.";
    OverBoundPagesTotal = "kvd_over_bound_pages_total", Counter, "Sampled pages over the codec's error bound, kept with a safer side, by side.";
    AttendedQueryTokensTotal = "kvd_attended_query_tokens_total", Counter, "Query tokens answered, counted once per layer.";
    AttendedStoredBytesTotal = "kvd_attended_stored_bytes_total", Counter, "Bytes of pages and raw rows named by attend batches.";
    AttendedLogicalBytesTotal = "kvd_attended_logical_bytes_total", Counter, "The same tokens' bytes in the stored precision.";

    Models = "kvd_models", Gauge, "Registered models.";
    Sequences = "kvd_sequences", Gauge, "Open sequences of a model.";
    PackedValues = "kvd_packed_values", Gauge, "K and V values held in packed blocks.";
    PackedBytes = "kvd_packed_bytes", Gauge, "Bytes of packed blocks, by side.";
    PackedPartBytes = "kvd_packed_part_bytes", Gauge, "Bytes of packed blocks, by part: codes, scales, offsets, header.";
    RawValues = "kvd_raw_values", Gauge, "K and V values held in windows and open blocks.";
    RawBytes = "kvd_raw_bytes", Gauge, "Bytes reserved for windows and open blocks.";
    ModelOnceBytes = "kvd_model_once_bytes", Gauge, "Bytes a model takes once, by part: calibration, tables.";
    TableVersions = "kvd_table_versions", Gauge, "Versions of the Huffman tables that a model builds from its blocks: one per layer and side, more where codes have drifted.";
    BitsPerValue = "kvd_packed_bits_per_value", Gauge, "Bits of packed blocks per K or V value, everything counted.";
    CompressionRatio = "kvd_compression_ratio", Gauge, "Bytes in the stored precision over bytes held, windows included.";
    CodecError = "kvd_codec_error_ratio", Gauge, "Relative root-mean-square error of about the last 256 sampled blocks, by side; NaN before the first.";
    ErrorBound = "kvd_error_bound_ratio", Gauge, "Error bound that the codec declares, by side; 0 without one.";

    PoolCapacityBytes = "kvd_pool_capacity_bytes", Gauge, "Page memory of a tier.";
    PoolUsedBytes = "kvd_pool_used_bytes", Gauge, "Page memory in use.";
    PoolLargestFreeBytes = "kvd_pool_largest_free_bytes", Gauge, "Largest slot that could be reserved now.";
    PoolSlots = "kvd_pool_slots", Gauge, "Slots in use.";
}
