//! Layers of models on the device: room for their tables, which a model gets whole when it is
//! registered, and what their kernels are launched with.

use super::{CudaBackend, ROWS_USUAL, device_error};
use crate::backend::memory::ALIGN;
use crate::block_table::one_page;
use crate::jit::JitCompiler;
use crate::kernel_choice::ROWS;
use crate::{LatePairs, LaunchChoices, LayerMemory, LayerShapes, QueryTransforms, StoreShapes};
use kvd_codec::{EntropyCoding, ModelCodec, SideSpec};
use kvd_compute::{BackendError, Sampling};
use kvd_core::{ErrorCode, LayerIndex, ModelId, Side};
use std::collections::BTreeMap;

/// The tables that a layer's kernels read, and their device addresses.
pub(super) struct DeviceLayer {
    /// Launch choices by the query rows that kernels take: 1, 4 or 8. All shapes have the same
    /// tables, which the first keeps.
    pub(super) by_rows: BTreeMap<u32, (LaunchChoices, LayerShapes)>,
    pub(super) tables: u64,
    /// Where kernels encode.
    pub(super) store: Option<(StoreShapes, u64)>,
    /// Transforms of queries in a worker's memory; uploaded with the first of them.
    pub(super) turns: Option<(QueryTransforms, u64)>,
}

impl DeviceLayer {
    pub(super) fn can_store(&self) -> bool {
        self.store.is_some()
    }

    /// Whether there are choices for so many rows, made with these late kernels.
    fn is_for(&self, rows: u32, late: LatePairs) -> bool {
        self.by_rows.get(&rows).is_some_and(|(choices, _)| choices.late_pairs() == late)
    }

    fn is_current(&self, codec: &ModelCodec) -> bool {
        self.by_rows.values().all(|(_, shapes)| shapes.is_current(codec))
    }
}

/// A model's layers, and which of its blocks are measured. Its codec is the host's, which builds
/// Huffman tables.
#[derive(Default)]
pub(super) struct DeviceModel {
    pub(super) layers: BTreeMap<LayerIndex, DeviceLayer>,
    pub(super) sampling: Sampling,
    /// Where the tables of all layers lie; none where it was not asked whether they have room, and
    /// they have none.
    room: Option<ModelMemory>,
}

/// One piece of the device's memory.
struct ModelMemory {
    address: u64,
    layers: Vec<LayerMemory>,
}

/// A place for a part of a layer.
#[derive(Clone, Copy)]
pub(super) struct DeviceRange {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// Where the parts of a layer lie.
pub(super) struct LayerRanges {
    tables: DeviceRange,
    steps: DeviceRange,
    pub(super) turns: DeviceRange,
}

fn memory_parts(room: &LayerMemory) -> [u64; 3] {
    [room.tables, room.steps, room.turns].map(|bytes| (bytes as u64).next_multiple_of(ALIGN))
}

impl ModelMemory {
    fn total_bytes(layers: &[LayerMemory]) -> u64 {
        layers.iter().flat_map(memory_parts).sum()
    }

    fn layer_ranges(&self, layer: LayerIndex) -> LayerRanges {
        let index = layer.0 as usize;
        let mut address = self.address + Self::total_bytes(&self.layers[..index]);
        let [tables, steps, turns] = memory_parts(&self.layers[index]).map(|bytes| {
            address += bytes;
            DeviceRange { address: address - bytes, bytes }
        });
        LayerRanges { tables, steps, turns }
    }
}

impl CudaBackend {
    /// Pairs whose late kernels are loaded.
    fn loaded_late_pairs(&self) -> LatePairs {
        self.jit.as_ref().map_or(LatePairs::NONE, JitCompiler::loaded_late_pairs)
    }

    /// The launch choices of a layer's kernels for units of `rows` query rows, where `late` are
    /// there.
    fn launch_choices(
        &self,
        codec: &ModelCodec,
        layer: LayerIndex,
        rows: u32,
        late: LatePairs,
    ) -> Result<(LaunchChoices, LayerShapes), BackendError> {
        let limits = self.device.limits();
        let choices = LaunchChoices::for_layer(codec, layer, rows, (limits, late)).ok_or_else(|| {
            let message = format!(
                "no thread block of this codec's kernels fits {}; register the model with another \
                 codec or on another device",
                limits.name
            );
            device_error(ErrorCode::InvalidCodec, message)
        })?;
        Ok((choices, LayerShapes::new(codec, layer, choices.codebook_rooms())))
    }

    /// Whether there are kernels for every layer, and room for the tables that they read.
    pub(super) fn check_served(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        let rooms = self.layer_memory(codec, |shapes| Ok(shapes.check_heads()?))?;
        // A plan's prediction is exact except for Huffman tables, which come with calibrations.
        let has_codes = |spec: &&SideSpec| spec.entropy == EntropyCoding::Huffman;
        let coded = |side: &Side| codec.spec().side_specs(*side).iter().any(has_codes);
        let layers = if Side::BOTH.iter().any(coded) { codec.geometry().layers } else { 0 };
        let later: &[_] = if self.jit.is_some() { &[LatePairs::ALL] } else { &[] };
        let sets = || [LatePairs::NONE].iter().chain(later);
        for layer in (0..layers).map(LayerIndex) {
            for (rows, late) in
                ROWS.into_iter().flat_map(|rows| sets().map(move |late| (rows, late)))
            {
                let (choices, shapes) = self.launch_choices(codec, layer, rows, *late)?;
                let plan = one_page(codec, layer, rows);
                let options = choices.table_options(&plan, codec.geometry().kv_heads);
                shapes.check_room(&plan, codec, options)?;
            }
        }
        self.device.has_room(ModelMemory::total_bytes(&rooms))
    }

    /// Upper bound of the memory of every layer; an error when one of its shapes is wrong.
    fn layer_memory(
        &self,
        codec: &ModelCodec,
        check: impl Fn(&LayerShapes) -> Result<(), BackendError>,
    ) -> Result<Vec<LayerMemory>, BackendError> {
        let layers = (0..codec.geometry().layers).map(LayerIndex);
        let room = |layer| {
            let (_, shapes) =
                self.launch_choices(codec, layer, ROWS[2], self.loaded_late_pairs())?;
            check(&shapes)?;
            Ok(LayerMemory::new(codec, layer, &shapes))
        };
        layers.map(room).collect()
    }

    /// Reserves room for a model's tables, once.
    pub(super) fn reserve_model(&mut self, model: ModelId) -> Result<(), BackendError> {
        if self.models.get(&model).is_some_and(|known| known.room.is_some()) {
            return Ok(());
        }
        let layers = self.layer_memory(self.model_codec(model)?, |_| Ok(()))?;
        let address = self.device.reserve_table(ModelMemory::total_bytes(&layers))?;
        self.models.entry(model).or_default().room = Some(ModelMemory { address, layers });
        Ok(())
    }

    /// Where a layer's parts lie; reserves them where the model has no room yet.
    pub(super) fn layer_ranges(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
    ) -> Result<LayerRanges, BackendError> {
        self.reserve_model(model)?;
        let room = self.models.get(&model).and_then(|known| known.room.as_ref());
        Ok(room.unwrap_or_else(|| unreachable!("it was just reserved")).layer_ranges(layer))
    }

    /// Forgets a model's layers and gives their room back.
    pub(super) fn forget_model(&mut self, model: ModelId) {
        let room = self.models.remove(&model).and_then(|model| model.room);
        room.into_iter().for_each(|room| self.device.free_table(room.address));
    }

    /// A layer with its tables on the device, brought there once, and ready for kernels of that
    /// many query rows where it is known, those that were compiled late among them.
    pub(super) fn bring_layer(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        rows: Option<u32>,
    ) -> Result<&DeviceLayer, BackendError> {
        let late = self.loaded_late_pairs();
        let codec = self.host.codec(model)?;
        let layers = &self.models.entry(model).or_default().layers;
        let known = layers.get(&layer).filter(|known| known.is_current(codec));
        let missing = rows.filter(|rows| known.is_some_and(|known| !known.is_for(*rows, late)));
        if known.is_none() {
            let places = self.layer_ranges(model, layer)?;
            let codec = self.host.codec(model)?;
            let rows = rows.unwrap_or(ROWS_USUAL);
            let (choices, shapes) = self.launch_choices(codec, layer, rows, late)?;
            let store = StoreShapes::new(codec, layer, &shapes);
            let tables = self.device.write_table(places.tables, &shapes.tables)?;
            let store = match store {
                Some(store) => Some((self.device.write_table(places.steps, &store.steps)?, store)),
                None => None,
            };
            let store = store.map(|(address, store)| (store, address));
            let by_rows = BTreeMap::from([(rows, (choices, shapes))]);
            let layers = &mut self.models.entry(model).or_default().layers;
            // Transforms of queries stay when Huffman tables are replaced.
            let turns = layers.remove(&layer).and_then(|stale| stale.turns);
            layers.insert(layer, DeviceLayer { by_rows, tables, store, turns });
        } else if let Some(rows) = missing {
            let (choices, mut shapes) = self.launch_choices(codec, layer, rows, late)?;
            // They lie on the device already.
            shapes.tables = Vec::new();
            let known = self.models.entry(model).or_default().layers.get_mut(&layer);
            if let Some(known) = known {
                known.by_rows.insert(rows, (choices, shapes));
            }
        }
        Ok(&self.models[&model].layers[&layer])
    }
}
