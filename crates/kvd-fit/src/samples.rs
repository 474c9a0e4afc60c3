//! Rows that a calibration is fitted on.

use crate::outliers::InlierRows;
use kvd_codec::CalibrationError;
use kvd_core::{Geometry, LayerIndex, Side};

/// Rows that a calibration looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleKind {
    /// Keys.
    Keys,
    /// Values.
    Values,
    /// Queries.
    Queries,
}

impl SampleKind {
    pub(crate) fn of_side(side: Side) -> Self {
        match side {
            Side::Key => Self::Keys,
            Side::Value => Self::Values,
        }
    }
}

impl std::fmt::Display for SampleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Keys => "keys",
            Self::Values => "values",
            Self::Queries => "queries",
        })
    }
}

/// Rows of a layer that fits leave out or clip: zeros, copies, and what is far beyond all others of
/// its head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SetAside {
    /// The layer.
    pub layer: LayerIndex,
    /// Keys, values or queries.
    pub kind: SampleKind,
    /// Rows of all heads.
    pub rows: usize,
    /// Rows of zeros, which are left out.
    pub zeros: usize,
    /// Rows that repeat others, which are left out where they are many.
    pub repeated: usize,
    /// Rows far beyond the others, which are left out.
    pub left_out: usize,
    /// Rows with clipped values.
    pub clipped: usize,
    /// Length of the longest row, in medians of the lengths of its head's rows.
    pub longest: f64,
}

/// Rows of each layer, side and KV head, as they arrive from a model (K after RoPE).
#[derive(Clone, Debug)]
pub struct Samples {
    geometry: Geometry,
    rows: Vec<Vec<f32>>,
    /// Per layer and KV head.
    queries: Vec<Vec<f32>>,
}

impl Samples {
    /// No rows yet.
    #[must_use]
    pub fn new(geometry: &Geometry) -> Self {
        let lists = 2 * geometry.layers as usize * geometry.kv_heads as usize;
        Self {
            geometry: geometry.clone(),
            rows: vec![Vec::new(); lists],
            queries: vec![Vec::new(); lists / 2],
        }
    }

    /// Appends `rows` (`[tokens, head_dim]`, row-major).
    ///
    /// # Errors
    /// When the place is outside the geometry, the length is no multiple of the head size, or a
    /// value is not finite.
    pub fn push(
        &mut self,
        layer: LayerIndex,
        side: Side,
        head: usize,
        rows: &[f32],
    ) -> Result<(), CalibrationError> {
        self.check_rows(layer, side, head, rows)?;
        let index = self.head_index(layer, side, head);
        self.rows[index].extend_from_slice(rows);
        Ok(())
    }

    /// Appends queries (`[tokens, head_dim_k]`, after RoPE) of any query head that shares the KV
    /// head; of transforms that look at them ([`kvd_codec::Transform::reads_queries`]).
    ///
    /// # Errors
    /// As [`Samples::push`].
    pub fn push_queries(
        &mut self,
        layer: LayerIndex,
        head: usize,
        rows: &[f32],
    ) -> Result<(), CalibrationError> {
        self.check_rows(layer, Side::Key, head, rows)?;
        let index = layer.0 as usize * self.geometry.kv_heads as usize + head;
        self.queries[index].extend_from_slice(rows);
        Ok(())
    }

    /// Queries pushed so far for one KV head; empty outside the geometry.
    #[must_use]
    pub fn queries(&self, layer: LayerIndex, head: usize) -> &[f32] {
        if head >= self.geometry.kv_heads as usize {
            return &[];
        }
        let index = layer.0 as usize * self.geometry.kv_heads as usize + head;
        self.queries.get(index).map_or(&[], Vec::as_slice)
    }

    /// Rows pushed so far for one head, `[tokens, head_dim]`; empty outside the geometry.
    #[must_use]
    pub fn rows(&self, layer: LayerIndex, side: Side, head: usize) -> &[f32] {
        if head >= self.geometry.kv_heads as usize {
            return &[];
        }
        self.rows.get(self.head_index(layer, side, head)).map_or(&[], Vec::as_slice)
    }

    /// Takes out some of `parts` equal parts of every head's rows and queries, the parts in the
    /// order in which rows were pushed; what is left over by the division stays.
    #[must_use]
    pub fn hold_out(&mut self, parts: usize, out: &[usize]) -> Self {
        let mut held = Self::new(&self.geometry);
        let [key_dim, value_dim] = Side::BOTH.map(|side| self.geometry.head_dim(side));
        let kv_heads = self.geometry.kv_heads as usize;
        let move_parts = |from: &mut Vec<f32>, to: &mut Vec<f32>, dim: usize| {
            let part = from.len() / dim / parts.max(1) * dim;
            let all = std::mem::take(from);
            let whole = part * parts;
            for (index, rows) in all[..whole].chunks(part.max(1)).enumerate() {
                if out.contains(&index) { &mut *to } else { &mut *from }.extend_from_slice(rows);
            }
            from.extend_from_slice(&all[whole..]);
        };
        for (index, (from, to)) in self.rows.iter_mut().zip(&mut held.rows).enumerate() {
            let dim = if (index / kv_heads).is_multiple_of(2) { key_dim } else { value_dim };
            move_parts(from, to, dim);
        }
        for (from, to) in self.queries.iter_mut().zip(&mut held.queries) {
            move_parts(from, to, key_dim);
        }
        held
    }

    /// Rows that fits leave out or clip; nothing where a layer has none.
    #[must_use]
    pub fn set_aside(&self) -> Vec<SetAside> {
        let layers = (0..self.geometry.layers).map(LayerIndex);
        let kinds = [SampleKind::Keys, SampleKind::Values, SampleKind::Queries];
        let all = layers.flat_map(|layer| kinds.map(|kind| self.set_aside_of(layer, kind)));
        all.filter(|found| found.zeros + found.repeated + found.left_out + found.clipped > 0)
            .collect()
    }

    fn set_aside_of(&self, layer: LayerIndex, kind: SampleKind) -> SetAside {
        let (rows, zeros, repeated, left_out, clipped) = (0, 0, 0, 0, 0);
        let mut found =
            SetAside { layer, kind, rows, zeros, repeated, left_out, clipped, longest: 1.0 };
        for head in 0..self.geometry.kv_heads as usize {
            let (rows, side) = match kind {
                SampleKind::Keys => (self.rows(layer, Side::Key, head), Side::Key),
                SampleKind::Values => (self.rows(layer, Side::Value, head), Side::Value),
                SampleKind::Queries => (self.queries(layer, head), Side::Key),
            };
            let dim = self.geometry.head_dim(side);
            let varied = self.varied_rows(layer, kind, head);
            found.repeated += varied.repeated;
            let inliers = InlierRows::new(varied.rows, dim);
            found.rows += rows.len() / dim;
            found.zeros += inliers.zeros;
            found.left_out += inliers.left_out;
            found.clipped += inliers.clipped;
            found.longest = found.longest.max(inliers.longest);
        }
        found
    }

    /// The geometry given to [`Samples::new`].
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn check_rows(
        &self,
        layer: LayerIndex,
        side: Side,
        head: usize,
        rows: &[f32],
    ) -> Result<(), CalibrationError> {
        let dim = self.geometry.head_dim(side);
        if layer.0 >= self.geometry.layers || head >= self.geometry.kv_heads as usize {
            let place = format!("layer {layer} head {head} is outside the geometry");
            return Err(CalibrationError::Shape(place));
        }
        if !rows.len().is_multiple_of(dim) {
            let shape = format!("{} values are not whole rows of {dim}", rows.len());
            return Err(CalibrationError::Shape(shape));
        }
        if !rows.iter().all(|x| x.is_finite()) {
            return Err(CalibrationError::NonFinite { layer: layer.0, side, head });
        }
        Ok(())
    }

    fn head_index(&self, layer: LayerIndex, side: Side, head: usize) -> usize {
        (layer.0 as usize * 2 + side.index()) * self.geometry.kv_heads as usize + head
    }
}
