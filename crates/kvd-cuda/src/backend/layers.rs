//! Layers of models on the device: room for their tables, which a model gets whole when it is
//! registered, and what their kernels are launched with.

use super::{CudaBackend, ROWS_USUAL, error};
use crate::backend::memory::ALIGN;
use crate::jit::Jit;
use crate::side::ROWS;
use crate::tables::one_page;
use crate::{Choices, LatePairs, LayerRoom, Shapes, StoreShapes, Turns};
use kvd_codec::{EntropyCoding, ModelCodec, SideSpec};
use kvd_compute::{BackendError, Sampling};
use kvd_core::{ErrorCode, LayerIndex, ModelId, Side};
use std::collections::BTreeMap;

/// What a layer's kernels read, and where it lies on the device.
pub(super) struct Layer {
    /// What kernels are launched with, by the query rows that they take: 1, 4 or 8. All shapes have
    /// the same tables, which the first keeps.
    pub(super) by_rows: BTreeMap<u32, (Choices, Shapes)>,
    pub(super) tables: u64,
    /// Where kernels encode.
    pub(super) store: Option<(StoreShapes, u64)>,
    /// What takes queries from a worker's memory; brought with the first of them.
    pub(super) turns: Option<(Turns, u64)>,
}

impl Layer {
    pub(super) fn stores(&self) -> bool {
        self.store.is_some()
    }

    /// Whether there are choices for so many rows, made with these late kernels.
    fn is_for(&self, rows: u32, late: LatePairs) -> bool {
        self.by_rows.get(&rows).is_some_and(|(choices, _)| choices.late() == late)
    }

    fn is_current(&self, codec: &ModelCodec) -> bool {
        self.by_rows.values().all(|(_, shapes)| shapes.is_current(codec))
    }
}

/// A model's layers, and which of its blocks are measured. Its codec is the host's, which builds
/// Huffman tables.
#[derive(Default)]
pub(super) struct Model {
    pub(super) layers: BTreeMap<LayerIndex, Layer>,
    pub(super) sampling: Sampling,
    /// Where the tables of all layers lie; none where it was not asked whether they have room, and
    /// they have none.
    room: Option<ModelRoom>,
}

/// One piece of the device's memory.
struct ModelRoom {
    address: u64,
    layers: Vec<LayerRoom>,
}

/// A place for a part of a layer.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// Where the parts of a layer lie.
pub(super) struct LayerPlaces {
    tables: Place,
    steps: Place,
    pub(super) turns: Place,
}

fn parts(room: &LayerRoom) -> [u64; 3] {
    [room.tables, room.steps, room.turns].map(|bytes| (bytes as u64).next_multiple_of(ALIGN))
}

impl ModelRoom {
    fn bytes(layers: &[LayerRoom]) -> u64 {
        layers.iter().flat_map(parts).sum()
    }

    fn places(&self, layer: LayerIndex) -> LayerPlaces {
        let index = layer.0 as usize;
        let mut address = self.address + Self::bytes(&self.layers[..index]);
        let [tables, steps, turns] = parts(&self.layers[index]).map(|bytes| {
            address += bytes;
            Place { address: address - bytes, bytes }
        });
        LayerPlaces { tables, steps, turns }
    }
}

impl CudaBackend {
    /// Pairs whose late kernels are loaded.
    fn late(&self) -> LatePairs {
        self.jit.as_ref().map_or(LatePairs::NONE, Jit::late)
    }

    /// What a layer's kernels for units of `rows` query rows are launched with, where `late` are
    /// there.
    fn choices(
        &self,
        codec: &ModelCodec,
        layer: LayerIndex,
        rows: u32,
        late: LatePairs,
    ) -> Result<(Choices, Shapes), BackendError> {
        let limits = self.device.limits();
        let choices = Choices::of_layer(codec, layer, rows, (limits, late)).ok_or_else(|| {
            let message = format!(
                "no thread block of this codec's kernels fits {}; register the model with another \
                 codec or on another device",
                limits.name
            );
            error(ErrorCode::InvalidCodec, message)
        })?;
        Ok((choices, Shapes::new(codec, layer, choices.rooms())))
    }

    /// Whether there are kernels for every layer, and room for what they read.
    pub(super) fn serves(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        let rooms = self.rooms(codec, |shapes| Ok(shapes.check()?))?;
        // What a plan foresees is exact but for Huffman tables, which calibrations bring.
        let has_codes = |spec: &&SideSpec| spec.entropy == EntropyCoding::Huffman;
        let coded = |side: &Side| codec.spec().side_specs(*side).iter().any(has_codes);
        let layers = if Side::BOTH.iter().any(coded) { codec.geometry().layers } else { 0 };
        let later: &[_] = if self.jit.is_some() { &[LatePairs::ALL] } else { &[] };
        let sets = || [LatePairs::NONE].iter().chain(later);
        for layer in (0..layers).map(LayerIndex) {
            for (rows, late) in
                ROWS.into_iter().flat_map(|rows| sets().map(move |late| (rows, late)))
            {
                let (choices, shapes) = self.choices(codec, layer, rows, *late)?;
                let plan = one_page(codec, layer, rows);
                let options = choices.options(&plan, codec.geometry().kv_heads);
                shapes.check_room(&plan, codec, options)?;
            }
        }
        self.device.has_room(ModelRoom::bytes(&rooms))
    }

    /// What every layer takes at most, if nothing is wrong with its shapes.
    fn rooms(
        &self,
        codec: &ModelCodec,
        check: impl Fn(&Shapes) -> Result<(), BackendError>,
    ) -> Result<Vec<LayerRoom>, BackendError> {
        let layers = (0..codec.geometry().layers).map(LayerIndex);
        let room = |layer| {
            let (_, shapes) = self.choices(codec, layer, ROWS[2], self.late())?;
            check(&shapes)?;
            Ok(LayerRoom::new(codec, layer, &shapes))
        };
        layers.map(room).collect()
    }

    /// Reserves room for a model's tables, once.
    pub(super) fn reserve(&mut self, model: ModelId) -> Result<(), BackendError> {
        if self.models.get(&model).is_some_and(|known| known.room.is_some()) {
            return Ok(());
        }
        let layers = self.rooms(self.codec(model)?, |_| Ok(()))?;
        let address = self.device.reserve(ModelRoom::bytes(&layers))?;
        self.models.entry(model).or_default().room = Some(ModelRoom { address, layers });
        Ok(())
    }

    /// Where a layer's parts lie; reserves them where the model has no room yet.
    pub(super) fn places(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
    ) -> Result<LayerPlaces, BackendError> {
        self.reserve(model)?;
        let room = self.models.get(&model).and_then(|known| known.room.as_ref());
        Ok(room.unwrap_or_else(|| unreachable!("it was just reserved")).places(layer))
    }

    /// Forgets a model's layers and gives their room back.
    pub(super) fn forget(&mut self, model: ModelId) {
        let room = self.models.remove(&model).and_then(|model| model.room);
        room.into_iter().for_each(|room| self.device.free(room.address));
    }

    /// A layer with its tables on the device, brought there once, and ready for kernels of that
    /// many query rows where it is known, those that were compiled late among them.
    pub(super) fn bring_layer(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        rows: Option<u32>,
    ) -> Result<&Layer, BackendError> {
        let late = self.late();
        let codec = self.host.codec(model)?;
        let layers = &self.models.entry(model).or_default().layers;
        let known = layers.get(&layer).filter(|known| known.is_current(codec));
        let missing = rows.filter(|rows| known.is_some_and(|known| !known.is_for(*rows, late)));
        if known.is_none() {
            let places = self.places(model, layer)?;
            let codec = self.host.codec(model)?;
            let rows = rows.unwrap_or(ROWS_USUAL);
            let (choices, shapes) = self.choices(codec, layer, rows, late)?;
            let store = StoreShapes::new(codec, layer, &shapes);
            let tables = self.device.keep(places.tables, &shapes.tables)?;
            let store = match store {
                Some(store) => Some((self.device.keep(places.steps, &store.steps)?, store)),
                None => None,
            };
            let store = store.map(|(address, store)| (store, address));
            let by_rows = BTreeMap::from([(rows, (choices, shapes))]);
            let layers = &mut self.models.entry(model).or_default().layers;
            // Transforms of queries stay when Huffman tables are replaced.
            let turns = layers.remove(&layer).and_then(|stale| stale.turns);
            layers.insert(layer, Layer { by_rows, tables, store, turns });
        } else if let Some(rows) = missing {
            let (choices, mut shapes) = self.choices(codec, layer, rows, late)?;
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
