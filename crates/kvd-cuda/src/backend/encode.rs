//! Raw rows to pages: by store kernels, where a layer has them for all of its sides, so that rows
//! stay on the device; else, and for the blocks that are measured, by the host's encoder, which
//! makes the same bytes. Huffman tables are built and replaced before (`train.rs`).

use super::memory::DeviceMemory;
use super::region_copy::RegionCopy;
use super::{CudaBackend, HOST_BYTES};
use crate::StoreShapes;
use crate::abi::{STORE_THREADS, StoreParameters};
use crate::driver::{DeviceCopy, KernelLaunch};
use crate::store::{StoreLaunch, StorePlan, StoredPage};
use bytemuck::Zeroable;
use kvd_codec::{HEADER_BYTES, ModelCodec, PageHeader};
use kvd_compute::{
    AppendSteps, BackendError, EncodeAs, EncodeSource, EncodedPages, HeldPages, Sampling,
};
use kvd_core::{Extent, LayerIndex, ModelId, PackedBytes};

/// An encoded block, or why it is none.
type EncodeResult = Result<EncodedPages, BackendError>;

/// The pages of each block with their addresses; none of a block that has a page which cannot be
/// written.
type WrittenPages = Vec<Option<Vec<(u64, StoredPage)>>>;

/// Pages that lie in scratch memory, by block, or a worker's rows.
#[derive(Default)]
pub(super) struct ScratchPages {
    /// Counts calls that use scratch memory.
    pub(super) call: u64,
    blocks: Vec<Vec<(u64, PageHeader)>>,
    pub(super) staged: Option<RegionCopy>,
}

/// Where the parts of a plan lie on the device.
struct StoreAddresses {
    pages: u64,
    headers: u64,
    words: u64,
    units: Vec<u64>,
}

impl CudaBackend {
    /// Gives all scratch memory back, with the pages held in it.
    pub(super) fn clear_scratch(&mut self) {
        self.device.clear_scratch();
        self.held = ScratchPages { call: self.held.call + 1, ..ScratchPages::default() };
    }

    /// Encodes blocks of one layer; samples of them are measured.
    pub(super) fn encode_blocks(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<EncodeResult>, BackendError> {
        self.clear_scratch();
        if !self.bring_layer(model, layer, None)?.can_store() {
            return self.encode_on_host(model, layer, blocks, None);
        }
        self.watch_on_device(model, layer, blocks)?;
        self.bring_layer(model, layer, None)?;
        let [measured_as, as_is] = [true, false].map(|measured| EncodeAs { measured });
        let state = self.models.entry(model).or_default();
        let due = state.sampling.due(layer, blocks.len());
        let pick = |wanted: bool| {
            let of_kind = blocks.iter().zip(&due).filter(move |(_, due)| **due == wanted);
            of_kind.map(|(block, _)| *block).collect::<Vec<_>>()
        };
        let measured = self.encode_on_host(model, layer, &pick(true), Some(measured_as))?;
        let others = if Sampling::is_alarming(&measured) {
            self.encode_on_host(model, layer, &pick(false), Some(measured_as))?
        } else {
            self.encode_on_device(model, layer, &pick(false), as_is)?
        };
        let [mut measured, mut others] = [measured.into_iter(), others.into_iter()];
        let next = |due: &bool| if *due { measured.next() } else { others.next() };
        let encoded: Vec<EncodeResult> = due.iter().filter_map(next).collect();
        self.models.entry(model).or_default().sampling.note_blocks(layer, &encoded);
        Ok(encoded)
    }

    /// Copies rows to the host and encodes them there, as told or as the host decides.
    fn encode_on_host(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
        how: Option<EncodeAs>,
    ) -> Result<Vec<EncodeResult>, BackendError> {
        let mut encoded = Vec::new();
        self.on_host(blocks, |backend, fetched| {
            encoded.extend(match how {
                None => backend.host.encode(model, layer, fetched)?,
                Some(how) => backend.host.encode_as(model, layer, fetched, how)?,
            });
            Ok(())
        })?;
        Ok(encoded)
    }

    /// Copies rows to the host and counts their codes there.
    pub(super) fn observe_on_host(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<(), BackendError> {
        self.on_host(blocks, |backend, fetched| backend.host.observe_blocks(model, layer, fetched))
    }

    /// Copies rows to the host, and runs with as many blocks at a time as it has memory for.
    fn on_host(
        &mut self,
        blocks: &[EncodeSource],
        mut run: impl FnMut(&mut Self, &[EncodeSource]) -> Result<(), BackendError>,
    ) -> Result<(), BackendError> {
        let (mut fetched, mut used) = (Vec::new(), 0);
        for block in blocks {
            if used + block.extent.len > HOST_BYTES {
                run(self, &std::mem::take(&mut fetched))?;
                used = 0;
            }
            let extent = self.fetch_extent(block.extent, used)?;
            used = extent.end();
            fetched.push(EncodeSource { extent, ..*block });
        }
        if fetched.is_empty() { Ok(()) } else { run(self, &fetched) }
    }

    /// Encodes with store kernels, as many blocks at once as scratch memory has room for. Blocks
    /// for which it has none, and those that no page can hold, go to the host, `how` there.
    fn encode_on_device(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
        how: EncodeAs,
    ) -> Result<Vec<EncodeResult>, BackendError> {
        let mut encoded = Vec::with_capacity(blocks.len());
        let (mut rest, mut count) = (blocks, blocks.len());
        while count > 0 {
            let (now, later) = rest.split_at(count);
            let Some(pages) = self.write_blocks(model, layer, now)? else {
                count /= 2;
                continue;
            };
            for (block, pages) in now.iter().zip(pages) {
                encoded.push(match pages {
                    Some(pages) => self.hold_pages(model, block, pages),
                    None => self.encode_on_host(model, layer, &[*block], Some(how))?.remove(0),
                });
            }
            (rest, count) = (later, later.len());
        }
        encoded.extend(self.encode_on_host(model, layer, rest, Some(how))?);
        Ok(encoded)
    }

    /// Writes the pages of blocks; `None` when scratch memory has no room for them.
    fn write_blocks(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Option<WrittenPages>, BackendError> {
        let shared = self.device.limits().shared_memory();
        let plan = self
            .build_plan(model, layer, |shapes, codec| shapes.plan_pages(codec, blocks, shared))?;
        let before = self.device.scratch_used();
        let Some(placed) = self.place_store(&plan) else {
            self.device.keep_scratch(before);
            return Ok(None);
        };
        let mut pages = self.run_store(model, layer, &plan, &placed)?;
        if !self.store_priors(model, layer, (blocks, &plan), &mut pages)? {
            self.device.reuse_scratch(before);
            return Ok(None);
        }
        if pages.iter().any(Option::is_none) {
            let missing = |index: usize| pages[index].is_none();
            let as_rows = |shapes: &StoreShapes, codec: &ModelCodec| {
                shapes.plan_fallback(codec, blocks, shared, missing)
            };
            let plan = self.build_plan(model, layer, as_rows)?;
            if let Some(placed) = self.place_store(&plan) {
                let as_rows = self.run_store(model, layer, &plan, &placed)?;
                pages.iter_mut().zip(as_rows).for_each(|(page, row)| *page = page.or(row));
            }
        }
        let per_block = pages.len() / blocks.len();
        let of_blocks = pages.chunks_exact(per_block);
        Ok(Some(of_blocks.map(|pages| pages.iter().copied().collect()).collect()))
    }

    /// Writes those pages again, with their priors, whose Huffman codes take too much; says whether
    /// scratch memory has space for them. `pages` are those that `plan` wrote of `blocks`.
    fn store_priors(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        (blocks, plan): (&[EncodeSource], &StorePlan),
        pages: &mut [Option<(u64, StoredPage)>],
    ) -> Result<bool, BackendError> {
        let too_long: Vec<bool> = (0..)
            .zip(&*pages)
            .map(|(index, page)| page.is_some_and(|(_, page)| plan.takes_too_much(index, &page)))
            .collect();
        if !too_long.contains(&true) {
            return Ok(true);
        }
        let shared = self.device.limits().shared_memory();
        let with_priors = |shapes: &StoreShapes, codec: &ModelCodec| {
            shapes.plan_priors(codec, blocks, shared, |index| too_long[index])
        };
        let plan = self.build_plan(model, layer, with_priors)?;
        let Some(placed) = self.place_store(&plan) else { return Ok(false) };
        let with_priors = self.run_store(model, layer, &plan, &placed)?;
        for (page, other) in pages.iter_mut().zip(with_priors) {
            let bytes = |page: &(u64, StoredPage)| page.1.header.payload_len;
            *page = match (*page, other) {
                (Some(page), Some(other)) if bytes(&other) >= bytes(&page) => Some(page),
                (page, other) => other.or(page),
            };
        }
        Ok(true)
    }

    fn build_plan(
        &self,
        model: ModelId,
        layer: LayerIndex,
        plan: impl FnOnce(&StoreShapes, &ModelCodec) -> StorePlan,
    ) -> Result<StorePlan, BackendError> {
        let codec = self.model_codec(model)?;
        let of_layer = self.models.get(&model).and_then(|model| model.layers.get(&layer));
        let store = of_layer.and_then(|layer| layer.store.as_ref());
        Ok(store.map(|(shapes, _)| plan(shapes, codec)).unwrap_or_default())
    }

    fn place_store(&mut self, plan: &StorePlan) -> Option<StoreAddresses> {
        let mut take = |bytes: usize| self.device.take_scratch(bytes as u64);
        Some(StoreAddresses {
            pages: take(plan.page_bytes as usize)?,
            headers: take(plan.header_bytes())?,
            words: take(plan.words as usize * 4)?,
            units: {
                let units = plan.launches.iter().map(|launch| size_of_val(&launch.units[..]));
                units.map(&mut take).collect::<Option<_>>()?
            },
        })
    }

    /// Launches, and what the headers say.
    fn run_store(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        plan: &StorePlan,
        placed: &StoreAddresses,
    ) -> Result<Vec<Option<(u64, StoredPage)>>, BackendError> {
        let of_layer = &self.models[&model].layers[&layer];
        let steps = of_layer.store.as_ref().map_or(0, |(_, address)| *address);
        let (tables, device) = (of_layer.tables, &mut self.device);
        let mut header = placed.headers;
        for (launch, units) in plan.launches.iter().zip(&placed.units) {
            let places = StoreParameters {
                tables,
                steps,
                units: *units,
                pages: placed.pages,
                headers: header,
                words: placed.words,
                ..StoreParameters::zeroed()
            };
            launch_store(device, launch, places)?;
            header += (launch.units.len() * HEADER_BYTES) as u64;
        }
        let mut headers = vec![0; plan.header_bytes()];
        device.download_scratch(placed.headers, &mut headers)?;
        let pages = plan.read_pages(&headers).into_iter();
        Ok(pages.map(|page| page.map(|page| (placed.pages + page.offset, page))).collect())
    }

    /// Keeps a block's pages in mind until they are placed.
    fn hold_pages(
        &mut self,
        model: ModelId,
        block: &EncodeSource,
        pages: Vec<(u64, StoredPage)>,
    ) -> EncodeResult {
        let geometry = self.model_codec(model)?.geometry();
        let mut encoded = EncodedPages {
            bytes: Vec::new(),
            held: Some(HeldPages { call: self.held.call, block: self.held.blocks.len() as u32 }),
            page_ends: [].into(),
            packed: PackedBytes {
                values: u64::from(block.rows) * geometry.values_per_token(),
                ..PackedBytes::default()
            },
            fallback_pages: 0,
            sampled: None,
        };
        let (mut ends, mut end) = (Vec::with_capacity(pages.len()), 0);
        for (_, StoredPage { header, parts, .. }) in &pages {
            let bytes = header.page_bytes() as u64;
            encoded.packed.parts += *parts;
            encoded.packed.sides[header.side.index()] += bytes;
            encoded.fallback_pages += u32::from(header.fallback);
            end += bytes as u32;
            ends.push(end);
        }
        encoded.page_ends = ends.into();
        let pages = pages.into_iter().map(|(address, page)| (address, page.header));
        self.held.blocks.push(pages.collect());
        Ok(encoded)
    }

    /// Copies held pages into their slot, all at once, and keeps their headers.
    pub(super) fn place_held(&mut self, held: HeldPages, to: Extent) {
        let known =
            (held.call == self.held.call).then(|| self.held.blocks.get(held.block as usize));
        let Some(pages) = known.flatten() else {
            self.device.fail_with("pages are placed that are no longer held");
            return;
        };
        let mut runs: Vec<DeviceCopy> = Vec::new();
        let mut at = to.offset;
        for (address, header) in pages {
            let bytes = header.page_bytes() as u64;
            self.headers.insert(at, *header);
            match runs.last_mut() {
                Some(run) if run.from + run.bytes == *address => run.bytes += bytes,
                _ => runs.push(DeviceCopy { from: *address, to: at, bytes }),
            }
            at += bytes;
        }
        // A failure is kept and told to the worker, which then answers no one with success.
        let _ = self.device.copy_in(runs);
    }
}

/// Launches what store kernels do with some pages; of `places` the arena and what the launch itself
/// says are filled in.
pub(super) fn launch_store(
    device: &mut DeviceMemory,
    launch: &StoreLaunch,
    places: StoreParameters,
) -> Result<(), BackendError> {
    device.upload_scratch(places.units, bytemuck::cast_slice(&launch.units))?;
    let parameters = StoreParameters {
        arena: device.arena(),
        row_bytes: launch.row_bytes,
        gain_bytes: launch.gain_bytes,
        ..places
    };
    device.launch_kernel(KernelLaunch {
        kernel: &launch.kernel,
        blocks: launch.units.len() as u32,
        threads: STORE_THREADS,
        shared_bytes: launch.shared_bytes as u32,
        parameters: bytemuck::bytes_of(&parameters),
    })
}
