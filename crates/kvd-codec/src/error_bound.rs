//! The accuracy contract: what a codec promises about the error of a page, and what a page that
//! breaks the promise falls back to.
//!
//! A codec text may declare a bound per side (`k.bound=0.2`): the largest relative error of what
//! attention sees of a page, of scores for keys and of outputs for values (`attention_error.rs`).
//! Queries measure it that the layer has been asked lately ([`ModelCodec::set_queries`]). Where
//! there are none, keys with `qpca` are measured as coefficients, that is by what their errors do
//! to the scores of queries like those of the calibration, against how scores differ; and all
//! else by what the rows alone tell. The error of the rows themselves is a second figure that
//! nothing is
//! held to: large errors may lie where no query looks, and small ones where all do.
//! [`ModelCodec::encode_block_checked`] decodes each page again; one that is over the bound is
//! encoded with the next safer rung of a fixed ladder (4-bit codes, then FP8, then raw floats) that
//! keeps it. Rungs have no transforms and no
//! calibration, so that they hold whatever the data does.

use crate::attention_error::{self, ErrorSum, PageScores};
use crate::encode::{self, PagePlan};
use crate::model::EncodedBlock;
use crate::quantizer::bind::HeadPlace;
use crate::quantizer::float::FloatRows;
use crate::row_block::LayerSide;
use crate::{BlockRows, CodecError, HeadCodec, ModelCodec, PageReader, RowSpace, resolve_spec};
use kvd_core::{Geometry, LayerIndex, Side};
use std::sync::Arc;

/// Below the codec itself and above raw floats, most compact first.
const RUNGS: [&str; 2] = ["uniform(b=4,g=32,axis=token)", "fp8"];

/// One row of coefficients in this many is turned back for the second figure.
const ROW_INTERVAL: usize = 8;

/// Errors that [`ModelCodec::encode_block_checked`] found, by side, of what was stored.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckedBlock {
    /// Squared errors of what attention sees, at most 1 a page, and the number of pages.
    pub attention: [ErrorSum; 2],
    /// Squared errors of rows, and their squared norms.
    pub rows: [ErrorSum; 2],
    /// Pages over the declared bound, stored with a safer rung.
    pub over_bound: [u32; 2],
}

/// Errors of a page.
#[derive(Clone, Copy)]
struct PageError {
    /// Square of the relative error of what attention sees.
    attention: f64,
    rows: ErrorSum,
}

impl PageError {
    fn is_over(&self, bound: Option<f32>) -> bool {
        bound.is_some_and(|bound| {
            self.attention.is_nan() || self.attention.sqrt() > f64::from(bound)
        })
    }
}

/// The rows of a block that is checked, and what queries make of them.
struct BlockCheck<'a> {
    codec: &'a ModelCodec,
    block: &'a BlockRows<'a>,
    layer: LayerIndex,
    /// By KV head, once one of its pages has an error.
    scores: Vec<Option<PageScores>>,
}

/// The rungs of each side, for every head of it.
#[derive(Clone, Debug)]
pub(crate) struct FallbackChain {
    sides: [Vec<HeadCodec>; 2],
}

impl FallbackChain {
    pub(crate) fn new(geometry: &Geometry) -> Result<Self, CodecError> {
        let side = |side: Side| -> Result<Vec<HeadCodec>, CodecError> {
            let bind = |rung: &&str| {
                let spec = resolve_spec(&format!("k={rung}; v={rung}")).expect("the rungs parse");
                let mut heads = HeadCodec::bind_heads(
                    geometry,
                    &spec,
                    None,
                    LayerSide { layer: LayerIndex(0), side },
                )?;
                let mut head = heads.swap_remove(0);
                head.rung = true;
                Ok(head)
            };
            RUNGS.iter().map(bind).collect()
        };
        Ok(Self { sides: [side(Side::Key)?, side(Side::Value)?] })
    }

    /// The rung whose pages have that quantizer id.
    pub(crate) fn fallback_codec(&self, side: Side, quantizer: u8) -> Option<&HeadCodec> {
        self.sides[side.index()].iter().find(|rung| rung.quantizer_id() == quantizer)
    }
}

impl ModelCodec {
    /// As [`ModelCodec::encode_block`], and measures every page by decoding it; pages over the
    /// bound that the codec declares for their side are stored with a safer rung.
    ///
    /// # Errors
    /// As [`ModelCodec::encode_block`].
    pub fn encode_block_checked(
        &self,
        layer: LayerIndex,
        block: &BlockRows<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(EncodedBlock, CheckedBlock), CodecError> {
        let mut checked = CheckedBlock::default();
        let heads = self.geometry().kv_heads as usize;
        let scores = (0..heads).map(|_| None).collect();
        let mut check = BlockCheck { codec: self, block, layer, scores };
        let encoded = self.encode_pages(layer, block, out, &mut |plan, scratch, out| {
            let start = out.len();
            let mut page = encode::append_page(plan, scratch, out);
            let mut error = check.page_error(plan, &out[start..]);
            let side = plan.place.side;
            let bound = self.spec().bounds[side.index()];
            if error.is_over(bound) {
                checked.over_bound[side.index()] += 1;
                for rung in self.safer_codecs(plan.side, side) {
                    out.truncate(start);
                    page = encode::append_page(&PagePlan { side: &rung, ..*plan }, scratch, out);
                    error = check.page_error(plan, &out[start..]);
                    if !error.is_over(bound) {
                        break;
                    }
                }
            }
            checked.rows[side.index()] += error.rows;
            // One page that is all wrong must not stand for the errors of many others.
            let attention = if error.attention < 1.0 { error.attention } else { 1.0 };
            checked.attention[side.index()] += ErrorSum { error: attention, norm: 1.0 };
            page
        })?;
        Ok((encoded, checked))
    }

    /// The rungs above a head's own side, last the stored precision.
    fn safer_codecs(&self, head: &HeadCodec, side: Side) -> impl Iterator<Item = HeadCodec> {
        let tag = head.tag;
        let raw = HeadCodec {
            dim: head.dim,
            steps: Vec::new(),
            offset: None,
            gain: None,
            query_metric: false,
            quantizer: Arc::new(FloatRows(self.geometry().dtype)),
            variant: head.variant,
            trained_tables: false,
            trained_run: head.trained_run,
            rung: true,
            tag,
        };
        let rungs = self.ladder.sides[side.index()].iter();
        rungs.map(move |rung| HeadCodec { tag, ..rung.clone() }).chain(std::iter::once(raw))
    }
}

impl BlockCheck<'_> {
    /// Errors of the page at the end of a block that is being written.
    fn page_error(&mut self, plan: &PagePlan<'_>, page: &[u8]) -> PageError {
        let HeadPlace { layer, side, head } = plan.place;
        let dim = plan.side.dim();
        let reader = PageReader::open_page(self.codec, layer, side, head, page);
        let reader = reader.expect("it was just written");
        let mut decoded = vec![0f32; plan.rows.len()];
        reader.decode_rows(0, plan.rows.len() / dim, &mut decoded).expect("it was just written");
        let of_head = self.codec.head_codec(layer, side, head);
        let is_raw = reader.space() == RowSpace::Raw;
        if of_head.query_metric && !is_raw {
            return self.coefficient_error(plan, &mut decoded);
        }
        if !is_raw {
            let mut value = vec![0f32; dim];
            for row in decoded.chunks_exact_mut(dim) {
                of_head.invert_row(row, &mut value);
                row.copy_from_slice(&value);
            }
        }
        decoded.iter_mut().zip(plan.rows).for_each(|(value, row)| *value -= row);
        let delta = decoded;
        let rows = attention_error::row_error(&delta, plan.rows);
        let attention = match (side, self.known_queries(head)) {
            _ if rows.error == 0.0 => 0.0,
            (Side::Key, Some(queries)) => {
                self.head_scores(head, queries).key_error(queries, &delta, dim)
            }
            (Side::Value, Some(queries)) => {
                self.head_scores(head, queries).value_error(&delta, plan.rows, dim)
            }
            // The rows of a rung, in the metric of the others.
            (Side::Key, None) if of_head.query_metric => of_coefficients(of_head, plan.rows, delta),
            (Side::Key, None) => attention_error::key_error_of_rows(&delta, plan.rows, dim),
            (Side::Value, None) => attention_error::value_error_of_rows(&delta, plan.rows, dim),
        };
        PageError { attention, rows }
    }

    /// Errors of keys whose coefficients, `decoded`, are in the metric of queries.
    fn coefficient_error(&mut self, plan: &PagePlan<'_>, decoded: &mut [f32]) -> PageError {
        let HeadPlace { layer, side, head } = plan.place;
        let of_head = self.codec.head_codec(layer, side, head);
        let dim = of_head.dim();
        let (mut rows, mut value) = (ErrorSum::default(), vec![0f32; dim]);
        let each = decoded.chunks_exact(dim).zip(plan.rows.chunks_exact(dim));
        for (coefficients, row) in each.step_by(ROW_INTERVAL) {
            of_head.invert_row(coefficients, &mut value);
            value.iter_mut().zip(row).for_each(|(value, x)| *value -= x);
            rows += attention_error::row_error(&value, row);
        }
        let mut original = plan.rows.to_vec();
        of_head.transform_rows(&mut original);
        decoded.iter_mut().zip(&original).for_each(|(value, exact)| *value -= exact);
        let attention = match self.known_queries(head) {
            Some(queries) => {
                let mut folded = queries.to_vec();
                let _ = of_head.fold_queries(&mut folded);
                self.head_scores(head, queries).key_error(&folded, decoded, dim)
            }
            None => square_of(attention_error::row_error(decoded, &original)),
        };
        PageError { attention, rows }
    }
}

impl<'a> BlockCheck<'a> {
    /// Queries of a KV head, where enough are known.
    fn known_queries(&self, head: usize) -> Option<&'a [f32]> {
        self.codec.queries.get(&self.layer)?.of_head(head)
    }

    /// Scores of these queries over the keys of the block, computed once for a head.
    fn head_scores(&mut self, head: usize, queries: &[f32]) -> &PageScores {
        let dim = self.codec.geometry().head_dim(Side::Key);
        let rows = self.block.head_rows(Side::Key, head, dim);
        self.scores[head].get_or_insert_with(|| PageScores::new(queries, rows, dim))
    }
}

/// Squared error of keys that are wrong by `delta`, as coefficients of `head`.
fn of_coefficients(head: &HeadCodec, rows: &[f32], delta: Vec<f32>) -> f64 {
    let mut original = rows.to_vec();
    let mut wrong = delta;
    wrong.iter_mut().zip(rows).for_each(|(wrong, row)| *wrong += row);
    head.transform_rows(&mut original);
    head.transform_rows(&mut wrong);
    wrong.iter_mut().zip(&original).for_each(|(wrong, exact)| *wrong -= exact);
    square_of(attention_error::row_error(&wrong, &original))
}

fn square_of(sum: ErrorSum) -> f64 {
    if sum.error == 0.0 { 0.0 } else { sum.error / sum.norm }
}
