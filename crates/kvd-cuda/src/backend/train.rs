//! A layer's Huffman tables, from codes that kernels count: the rows of the blocks that they are
//! built from stay on the device.

use super::CudaBackend;
use super::encode::launch_store;
use crate::StoreParameters;
use crate::store::{CodeHistogram, HistogramPlan};
use bytemuck::Zeroable;
use kvd_codec::CodeCounts;
use kvd_compute::{BackendError, EncodeSource};
use kvd_core::{LayerIndex, ModelId};

/// Bytes of a counter.
const COUNTER_BYTES: usize = size_of::<u64>();

/// Where the parts of a plan lie on the device.
struct HistogramAddresses {
    pages: u64,
    words: u64,
    units: Vec<u64>,
}

/// Device addresses that all launches of a histogram read and write.
#[derive(Clone, Copy)]
struct HistogramTables {
    tables: u64,
    steps: u64,
    counters: u64,
}

impl CudaBackend {
    /// Counts the codes of those blocks that the codec chooses before any is encoded, so that it
    /// may replace Huffman tables that fit them badly, as the host would. Where a side has no
    /// kernel that counts, where scratch memory has no space for a block, or where rows hold what
    /// is no number, their rows come to the host.
    pub(super) fn watch_on_device(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<(), BackendError> {
        let chosen = self.host.choose_blocks_to_count(model, layer, blocks.len())?;
        if chosen.is_empty() {
            return Ok(());
        }
        let chosen: Vec<EncodeSource> = chosen.into_iter().map(|index| blocks[index]).collect();
        let counts = self.count_block_codes(model, layer, &chosen)?;
        self.device.reuse_scratch(0);
        match counts {
            Some(counts) => self.host.observe_codes(model, layer, &counts, chosen.len()),
            None => self.observe_on_host(model, layer, &chosen),
        }
    }

    /// How often each code stands in blocks.
    fn count_block_codes(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Option<Vec<CodeCounts>>, BackendError> {
        let known = self.bring_layer(model, layer, None)?;
        let (tables, codec) = (known.tables, self.host.codec(model)?);
        // Those of any number of query rows do: they differ in what attention keeps of codebooks.
        let shapes = self.models[&model].layers[&layer].by_rows.values().next();
        let Some(histogram) =
            shapes.and_then(|(_, shapes)| CodeHistogram::new(codec, layer, shapes))
        else {
            return Ok(None);
        };
        let mut bytes = vec![0; COUNTER_BYTES * histogram.len()];
        let places = [histogram.steps.len(), bytes.len()];
        let [Some(steps), Some(counters)] =
            places.map(|bytes| self.device.take_scratch(bytes as u64))
        else {
            return Ok(None);
        };
        self.device.upload_scratch(steps, &histogram.steps)?;
        self.device.upload_scratch(counters, &bytes)?;
        let common = HistogramTables { tables, steps, counters };
        let (mut rest, mut count) = (blocks, blocks.len());
        while !rest.is_empty() {
            let (now, later) = rest.split_at(count);
            let shared = self.device.limits().shared_memory();
            let plan = histogram.plan_launches(self.model_codec(model)?, now, shared);
            let before = self.device.scratch_used();
            let Some(placed) = self.place_counts(&plan) else {
                self.device.keep_scratch(before);
                count /= 2;
                if count == 0 {
                    return Ok(None);
                }
                continue;
            };
            self.run_counts(&plan, &placed, common)?;
            self.device.reuse_scratch(before);
            (rest, count) = (later, count.min(later.len()));
        }
        self.device.download_scratch(counters, &mut bytes)?;
        let words = bytes.as_chunks::<COUNTER_BYTES>().0.iter();
        let counts: Vec<u64> = words.map(|word| u64::from_le_bytes(*word)).collect();
        Ok(histogram.read_counts(&counts))
    }

    fn place_counts(&mut self, plan: &HistogramPlan) -> Option<HistogramAddresses> {
        let mut take = |bytes: u64| self.device.take_scratch(bytes);
        Some(HistogramAddresses {
            pages: take(plan.page_bytes)?,
            words: take(plan.words * 4)?,
            units: {
                let units = plan.launches.iter().map(|launch| size_of_val(&launch.units[..]));
                units.map(|bytes| take(bytes as u64)).collect::<Option<_>>()?
            },
        })
    }

    fn run_counts(
        &mut self,
        plan: &HistogramPlan,
        placed: &HistogramAddresses,
        common: HistogramTables,
    ) -> Result<(), BackendError> {
        let device = &mut self.device;
        for (launch, units) in plan.launches.iter().zip(&placed.units) {
            let places = StoreParameters {
                tables: common.tables,
                steps: common.steps,
                units: *units,
                pages: placed.pages,
                headers: common.counters,
                words: placed.words,
                ..StoreParameters::zeroed()
            };
            launch_store(device, launch, places)?;
        }
        Ok(())
    }
}
