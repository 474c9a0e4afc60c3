//! The names: one variant per metric, its kind, whose it is and its help text in one table.

/// The type of a metric, in the words of Prometheus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// A level.
    Gauge,
    /// A distribution.
    Histogram,
}

/// Whose series a metric has: they begin and end with it, and carry its labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricScope {
    /// The daemon as a whole; whatever labels each metric has of its own.
    Daemon,
    /// A device: `device`, its number in the configuration.
    Device,
    /// A registered model: `namespace`, `model`, `codec`.
    Model,
    /// A namespace: `namespace`.
    Namespace,
}

macro_rules! metrics {
    ($($variant:ident = $name:literal, $kind:ident, $scope:ident, $help:literal;)*) => {
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
            pub const fn kind(self) -> MetricKind {
                match self { $(Self::$variant => MetricKind::$kind,)* }
            }

            /// Owner of its series.
            #[must_use]
            pub const fn scope(self) -> MetricScope {
                match self { $(Self::$variant => MetricScope::$scope,)* }
            }

            /// Help text in the exposition.
            #[must_use]
            pub const fn help(self) -> &'static str {
                match self { $(Self::$variant => $help,)* }
            }
        }
    };
}

metrics! {
    BuildInfo = "kvd_build_info", Gauge, Daemon, "1, with version, commit, boot_id and device as labels.";
    Ready = "kvd_ready", Gauge, Daemon, "1 while requests are served, 0 while draining or failed.";

    RequestsTotal = "kvd_requests_total", Counter, Daemon, "Finished calls, messages of streams, and parts of steps that fail alone, by rpc and code.";
    RequestSeconds = "kvd_request_seconds", Histogram, Daemon, "Time from receipt to answer, by rpc.";
    TransportRefusalsTotal = "kvd_transport_refusals_total", Counter, Daemon, "Requests that gRPC itself refused before a call began, by reason: they are in no other count.";
    AccessRefusalsTotal = "kvd_access_refusals_total", Counter, Daemon, "Calls that were not let in, by reason: unauthenticated, role, namespace, limit (of a principal).";
    FileReloadsTotal = "kvd_file_reloads_total", Counter, Daemon, "Times that files of doors were read anew, by files (server_tls, admin_tls, principals) and result: ok, or failed, which leaves in force what was read before.";
    Insecure = "kvd_insecure", Gauge, Daemon, "1 while gRPC serves beyond the loopback without authentication (server.insecure).";
    Connections = "kvd_connections", Gauge, Daemon, "Open connections, by listener.";
    OpenStreams = "kvd_open_streams", Gauge, Daemon, "Open streams of requests or answers, by rpc.";
    InflightBytes = "kvd_inflight_bytes", Gauge, Daemon, "Bytes of requests and answers, from the length of a message until the answer is sent, of limits.inflight_bytes_max.";

    Regions = "kvd_regions", Gauge, Daemon, "Regions that workers share with the daemon.";
    RegionBytes = "kvd_region_bytes", Gauge, Daemon, "Bytes of their memory files.";

    RegionCallsTotal = "kvd_region_calls_total", Counter, Daemon, "Calls through regions, by where their payloads were: a memory file, device memory in place, or device memory copied through the host.";

    QueueDepth = "kvd_queue_depth", Gauge, Device, "Jobs waiting for the device, by kind: attend, other.";
    QueuedStreamMessages = "kvd_queued_stream_messages", Gauge, Device, "Messages of streams among the jobs that wait for the device, by kind: they take no place of device.queue_jobs_max, and are not refused.";
    QueueSeconds = "kvd_queue_seconds", Histogram, Device, "Time a job waited for the device, by kind: attend, other.";
    DeviceBusySecondsTotal = "kvd_device_busy_seconds_total", Counter, Device, "Time the device's thread spent on jobs, by kind: attend, other.";
    AbandonedJobsTotal = "kvd_abandoned_jobs_total", Counter, Device, "Jobs whose caller left, by when: before they began (taken out of the queue), or later (stopped, or answered to nobody).";
    StoreSeconds = "kvd_store_seconds", Histogram, Device, "Device time of one stored range, encoding included.";
    EncodeSeconds = "kvd_encode_seconds", Histogram, Device, "Device time to encode the blocks that left the window in one store.";
    AttendSeconds = "kvd_attend_seconds", Histogram, Device, "Device time of one attend batch.";
    MergedAttendsTotal = "kvd_merged_attends_total", Counter, Device, "Attends that were answered in one pass with those of other callers.";
    LoadSeconds = "kvd_load_seconds", Histogram, Device, "Device time of one piece of a load.";
    GpuLaunchesTotal = "kvd_gpu_launches_total", Counter, Daemon, "Attention launches on GPUs, by how: kernels one by one, graphs of several.";
    GpuGraphChangesTotal = "kvd_gpu_graph_changes_total", Counter, Daemon, "What was done to graphs before they were launched, by change: graphs made, nodes of graphs changed.";

    PoolCapacityBytes = "kvd_pool_capacity_bytes", Gauge, Device, "Page memory of the device, by tier: host, gpu.";
    PoolUsedBytes = "kvd_pool_used_bytes", Gauge, Device, "Page memory in use.";
    PoolLargestFreeBytes = "kvd_pool_largest_free_bytes", Gauge, Device, "Largest slot that could be reserved now.";
    PoolSlots = "kvd_pool_slots", Gauge, Device, "Slots in use: one for each packed or raw block of a layer.";

    MatchSeconds = "kvd_match_seconds", Histogram, Daemon, "Time to look keys up in the cache, of one call.";
    MatchKeysTotal = "kvd_match_keys_total", Counter, Daemon, "Keys that were looked up in the cache.";
    MatchHitTokensTotal = "kvd_match_hit_tokens_total", Counter, Daemon, "Tokens of prefixes that look-ups found.";
    AttachedTokensTotal = "kvd_attached_tokens_total", Counter, Daemon, "Tokens that new sequences took from the cache.";
    IndexEntries = "kvd_index_entries", Gauge, Device, "Cached blocks: pages of tokens on all layers.";
    CachedBytes = "kvd_cached_bytes", Gauge, Device, "Page memory of cached blocks, those that open sequences share included.";
    PinnedBytes = "kvd_pinned_bytes", Gauge, Device, "Page memory of blocks that clients pin.";
    Leases = "kvd_leases", Gauge, Device, "Leases on cached blocks that have not ended.";
    PublishedBlocksTotal = "kvd_published_blocks_total", Counter, Device, "Blocks that were published, by result: new, or existed.";
    EvictedBlocksTotal = "kvd_evicted_blocks_total", Counter, Device, "Cached blocks that went, by reason: room (the pool was full), limit (cache.pool_percent or cache.blocks_max), dropped (a client asked, or their model went).";
    EvictBlockedTotal = "kvd_evict_blocked_total", Counter, Device, "Reservations that were refused while blocks were cached, because all of them were held or too few could go.";

    EventsTotal = "kvd_events_total", Counter, Daemon, "Changes of the cache that were kept for watchers, of namespaces that are watched.";
    EventResetsTotal = "kvd_event_resets_total", Counter, Daemon, "Watches of the cache that were told all blocks anew, by reason: first (a new watch), gone (it asked for a number that is not there), behind (it read too slowly).";

    DiskEntries = "kvd_disk_entries", Gauge, Device, "Cached blocks that are on disk, those that are in the pool too included.";
    EvictedToDiskTotal = "kvd_evicted_to_disk_total", Counter, Device, "Of the cached blocks that went to make room, those that stay on disk.";
    PromotedBlocksTotal = "kvd_promoted_blocks_total", Counter, Daemon, "Blocks that came back from disk, or came from a shared store, for sequences that begin with them.";
    PromoteSeconds = "kvd_promote_seconds", Histogram, Daemon, "Time that a call waited for blocks from disk or from a shared store.";
    ImportRefusedTotal = "kvd_import_refused_total", Counter, Daemon, "Prefixes that came back shorter than they were matched, by reason: corrupt, gone, io, queue, tables_full, no_room, timeout, other, device, remote, closed.";
    TierState = "kvd_tier_state", Gauge, Daemon, "State of a tier, by tier: 0 writes, 1 the last batch failed, 2 gave up writing.";
    TierCapacityBytes = "kvd_tier_capacity_bytes", Gauge, Daemon, "Bytes that a tier may take, by tier.";
    TierUsedBytes = "kvd_tier_used_bytes", Gauge, Daemon, "Bytes that its files take, by tier.";
    TierQueueBytes = "kvd_tier_queue_bytes", Gauge, Daemon, "Bytes of blocks that wait to be written, by tier.";
    TierWriteBytesTotal = "kvd_tier_write_bytes_total", Counter, Daemon, "Bytes of records that became durable (disk) or were written (remote), by tier.";
    TierReadBytesTotal = "kvd_tier_read_bytes_total", Counter, Daemon, "Bytes that were read, by tier.";
    TierWriteDropsTotal = "kvd_tier_write_drops_total", Counter, Daemon, "Records that did not become durable, or did not reach the shared store, by tier and reason: queue, full, io, parent, other, remote (it failed).";
    TierErrorsTotal = "kvd_tier_errors_total", Counter, Daemon, "Failures of a tier's files, by tier and reason: write, sync, read, file.";
    Segments = "kvd_segments", Gauge, Daemon, "Files of the disk tier.";
    DurableLag = "kvd_durable_lag_seconds", Gauge, Daemon, "Age of the oldest record that is not yet durable.";
    ReinsertedBytesTotal = "kvd_reinserted_bytes_total", Counter, Daemon, "Bytes of records that were kept when the room of their segment was needed.";
    RecoveredBlocksTotal = "kvd_recovered_blocks_total", Counter, Daemon, "Records found at the start, by result: live, orphan, replaced, removed, torn.";
    RecoverSeconds = "kvd_recover_seconds", Gauge, Daemon, "Time that it took to find them.";
    RemoteState = "kvd_remote_state", Gauge, Daemon, "What the breaker of the store that daemons share does: 0 requests go through, 1 one does to find out, 2 none does.";
    RemoteRequestsTotal = "kvd_remote_requests_total", Counter, Daemon, "Requests to the store that daemons share, by op (find, read, write, remove) and result: ok (also where there is nothing), failed, full, denied, timeout, skipped (not made: the breaker was open, or too many were under way).";
    RemoteSeconds = "kvd_remote_seconds", Histogram, Daemon, "Time of a request to that store, by op: up to its answer, its failure or its deadline.";
    RemoteFoundBlocksTotal = "kvd_remote_found_blocks_total", Counter, Daemon, "Blocks that the store that daemons share was found to have.";
    CorruptRecordsTotal = "kvd_corrupt_records_total", Counter, Daemon, "Records that were found damaged, by tier.";

    Sessions = "kvd_sessions", Gauge, Daemon, "Sessions that are held, or that wait to be held again.";
    SessionEndsTotal = "kvd_session_ends_total", Counter, Daemon, "Sessions that ended, by reason: closed, expired (nobody held it for its time to live), taken_over.";
    SessionSequencesClosedTotal = "kvd_session_sequences_closed_total", Counter, Daemon, "Sequences that were closed because their session ended.";

    QuotaUsed = "kvd_quota_used", Gauge, Namespace, "What a namespace has of what a quota limits, by namespace and quota. No series where there is no limit.";
    QuotaAllowed = "kvd_quota_allowed", Gauge, Namespace, "What it may have; of reserved_bytes what others cannot take.";
    QuotaRefusalsTotal = "kvd_quota_refusals_total", Counter, Namespace, "Calls that were refused, and publishes that ended, because of a quota, by namespace and quota.";

    NamespaceWeight = "kvd_namespace_weight", Gauge, Namespace, "A namespace's share of a busy device and of the cache. No series where nobody has set a quota or a weight.";

    Models = "kvd_models", Gauge, Daemon, "Registered models.";
    ModelRegistered = "kvd_model_registered_timestamp_seconds", Gauge, Model, "When the model was registered, in seconds since 1970.";
    ModelLayers = "kvd_model_layers", Gauge, Model, "Layers of the model: a count by layer over it is one of tokens or blocks.";
    ModelDeviceSecondsTotal = "kvd_model_device_seconds_total", Counter, Model, "Device time spent on the model, by work: store (encode included), encode, attend, load.";
    ModelDeviceJobsTotal = "kvd_model_device_jobs_total", Counter, Model, "Jobs of the model that the device has ended, by work: store, encode, attend, load.";
    StoredLayerTokensTotal = "kvd_stored_layer_tokens_total", Counter, Model, "Tokens stored, counted once per layer: over kvd_model_layers they are tokens.";
    StoredLogicalBytesTotal = "kvd_stored_logical_bytes_total", Counter, Model, "Bytes of K and V stored, in the stored precision.";
    LoadedLogicalBytesTotal = "kvd_loaded_logical_bytes_total", Counter, Model, "Bytes of K and V loaded, in the stored precision.";
    EncodedLogicalBytesTotal = "kvd_encoded_logical_bytes_total", Counter, Model, "Bytes of K and V, in the stored precision, that were encoded.";
    EncodedPageBytesTotal = "kvd_encoded_page_bytes_total", Counter, Model, "Bytes of the pages that came out of encoding.";
    EncodedLayerBlocksTotal = "kvd_encoded_layer_blocks_total", Counter, Model, "Blocks encoded, counted once per layer.";
    PackDeferredTotal = "kvd_pack_deferred_total", Counter, Model, "Blocks of a layer that stayed raw for now because the pool had no room for their pages; none of a model whose codec compresses nothing.";
    FallbackPagesTotal = "kvd_fallback_pages_total", Counter, Model, "Pages that could not be quantized and were kept raw.";
    SampledBlocksTotal = "kvd_sampled_blocks_total", Counter, Model, "Blocks of a layer decoded again after encoding to measure their error.";
    OverBoundPagesTotal = "kvd_over_bound_pages_total", Counter, Model, "Sampled pages over the codec's error bound, kept with a safer side, by side.";
    AttendedLayerQueryTokensTotal = "kvd_attended_layer_query_tokens_total", Counter, Model, "Query tokens answered, counted once per layer: over kvd_model_layers they are tokens.";
    AttendedStoredBytesTotal = "kvd_attended_stored_bytes_total", Counter, Model, "Bytes of pages and raw rows named by attend batches.";
    AttendedLogicalBytesTotal = "kvd_attended_logical_bytes_total", Counter, Model, "The same tokens' bytes in the stored precision.";
    SavedBlockPassesTotal = "kvd_saved_block_passes_total", Counter, Model, "Passes over a layer's blocks that were not made because queries which read the same pages went through them together.";

    Sequences = "kvd_sequences", Gauge, Model, "Open sequences of a model.";
    HeldBytes = "kvd_held_bytes", Gauge, Model, "Bytes held in packed blocks, windows and open blocks.";
    LogicalBytes = "kvd_logical_bytes", Gauge, Model, "Bytes of the K and V held, in the stored precision.";
    SavedBytes = "kvd_saved_bytes", Gauge, Model, "Logical bytes less held bytes: what compression saves now. Below 0 while windows and open blocks take more than they hold.";
    PackedValues = "kvd_packed_values", Gauge, Model, "K and V values held in packed blocks.";
    PackedBytes = "kvd_packed_bytes", Gauge, Model, "Bytes of packed blocks, by side.";
    PackedPartBytes = "kvd_packed_part_bytes", Gauge, Model, "Bytes of packed blocks, by part: codes, scales, offsets, header.";
    RawValues = "kvd_raw_values", Gauge, Model, "K and V values held in windows and open blocks.";
    RawBytes = "kvd_raw_bytes", Gauge, Model, "Bytes reserved for windows and open blocks.";
    ModelOnceBytes = "kvd_model_once_bytes", Gauge, Model, "Bytes a model takes once, by part: calibration, tables.";
    TableVersions = "kvd_table_versions", Gauge, Model, "Versions of the Huffman tables that a model builds from its blocks: one per layer and side, more where codes have drifted.";
    PackedBytesPerValue = "kvd_packed_bytes_per_value", Gauge, Model, "Bytes of packed blocks per K or V value, everything counted: an eighth of the bits. No series while nothing is packed.";
    CompressionRatio = "kvd_compression_ratio", Gauge, Model, "Bytes in the stored precision over bytes held, windows included. No series while nothing is held.";
    CodecError = "kvd_codec_error_ratio", Gauge, Model, "Relative error of what attention sees of about the last 64 sampled blocks: of scores for keys, of outputs for values, by side. No series before the first.";
    CodecRowError = "kvd_codec_row_error_ratio", Gauge, Model, "Relative root-mean-square error of the rows of about the last 64 sampled blocks, by side. No series before the first.";
    ErrorBound = "kvd_error_bound_ratio", Gauge, Model, "Error bound that the codec declares, by side. No series for a side without one.";
}
