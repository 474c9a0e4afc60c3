//! Queries that attention over a layer has been asked, by which errors of its pages are measured.

use crate::{CodecError, ModelCodec};
use kvd_core::{LayerIndex, Side};

/// Queries of one layer, by KV head.
#[derive(Clone, Debug, Default)]
pub struct LayerQueries {
    heads: Vec<Vec<f32>>,
}

impl LayerQueries {
    /// Fewer queries of a head than this say too little about where others look.
    pub const FEWEST: usize = 8;
    /// More than this of a head are not looked at: a block is measured in little time.
    pub const MOST: usize = 16;

    /// Those of a KV head, `[n, head_dim_k]`, where there are enough.
    pub(crate) fn of_head(&self, head: usize) -> Option<&[f32]> {
        self.heads.get(head).map(Vec::as_slice).filter(|queries| !queries.is_empty())
    }
}

impl ModelCodec {
    /// Measures pages of a layer by these queries from now on: for each KV head rows of
    /// `[n, head_dim_k]` in the space of keys, times the scale of scores. Rows that are not finite
    /// or all zero say nothing and are left out; a head with fewer than [`LayerQueries::FEWEST`]
    /// others is measured without any, and of one with more than [`LayerQueries::MOST`] the last
    /// are taken.
    ///
    /// # Errors
    /// When the layer is none of the geometry, or the rows do not fit its heads.
    pub fn set_queries(&mut self, layer: LayerIndex, heads: &[Vec<f32>]) -> Result<(), CodecError> {
        let geometry = self.geometry();
        let dim = geometry.head_dim(Side::Key);
        if layer.0 >= geometry.layers {
            let text = format!("queries of layer {layer} of {}", geometry.layers);
            return Err(CodecError::Shape(text));
        }
        if heads.len() != geometry.kv_heads as usize {
            let text = format!("queries of {} KV heads of {}", heads.len(), geometry.kv_heads);
            return Err(CodecError::Shape(text));
        }
        if let Some(rows) = heads.iter().find(|rows| !rows.len().is_multiple_of(dim)) {
            let text = format!("{} values of queries are not whole rows of {dim}", rows.len());
            return Err(CodecError::Shape(text));
        }
        let of_head = |rows: &Vec<f32>| {
            let says =
                |row: &&[f32]| row.iter().all(|x| x.is_finite()) && row.iter().any(|x| *x != 0.0);
            let rows: Vec<&[f32]> = rows.chunks_exact(dim).filter(says).collect();
            let first = rows.len().saturating_sub(LayerQueries::MOST);
            if rows.len() < LayerQueries::FEWEST { Vec::new() } else { rows[first..].concat() }
        };
        let heads = heads.iter().map(of_head).collect();
        self.queries.insert(layer, LayerQueries { heads });
        Ok(())
    }
}
