//! The query rows of a plan: folded here where the host has them, units for a kernel where they are
//! in a worker's memory.

use super::TableBuilder;
use crate::abi::{TRANSFORM_ROWS, TransformUnit};
use kvd_compute::PlanQuery;
use kvd_core::Side;

/// Query rows of one head of one query.
pub(super) struct HeadRows {
    pub(super) head: usize,
    /// Query heads of the KV head.
    pub(super) group: usize,
    /// Index of the first query token in the batch.
    pub(super) batch_row: usize,
    /// First row of the queries as given; as many folded ones follow.
    pub(super) first: usize,
    pub(super) count: usize,
}

impl TableBuilder<'_> {
    /// Appends the queries of a head, as given and folded.
    pub(super) fn append_queries(
        &mut self,
        query: &PlanQuery,
        head: usize,
        batch_row: usize,
    ) -> HeadRows {
        let group = (self.plan.q_heads / self.codec.geometry().kv_heads) as usize;
        let count = query.n_q as usize * group;
        let first = self.tables.query_rows;
        self.tables.query_rows += 2 * count;
        let rows = HeadRows { head, group, batch_row, first, count };
        match self.q.take() {
            Some(q) => {
                self.fold_queries(&rows, &q);
                self.q = Some(q);
            }
            None => self.append_transform_units(&rows),
        }
        rows
    }

    /// Units that take a head's queries from a worker's memory.
    fn append_transform_units(&mut self, rows: &HeadRows) {
        self.tables.turns.extend((0..rows.count).step_by(TRANSFORM_ROWS).map(|first| {
            TransformUnit {
                fold: 0,
                unfold: 0,
                token: rows.batch_row as u32,
                head: (rows.head * rows.group) as u32,
                first: first as u32,
                count: (rows.count - first).min(TRANSFORM_ROWS) as u32,
                raw: (rows.first + first) as u32,
                folded: (rows.first + rows.count + first) as u32,
            }
        }));
    }

    /// Appends a head's queries `q`, scaled, as given and folded.
    fn fold_queries(&mut self, rows: &HeadRows, q: &[f32]) {
        let HeadRows { head, group, batch_row, first, count } = *rows;
        let dim = self.codec.geometry().head_dim(Side::Key);
        let q_heads = self.plan.q_heads as usize;
        let scale = self.plan.score_scale(dim);
        let tables = &mut self.tables;
        for row in 0..count {
            let row = (batch_row + row / group) * q_heads + head * group + row % group;
            tables.queries.extend(q[row * dim..][..dim].iter().map(|x| x * scale));
            tables.offsets.push(0.0);
        }
        let side = self.codec.head_codec(self.plan.layer, Side::Key, head);
        for row in 0..count {
            let raw = tables.queries[(first + row) * dim..][..dim].to_vec();
            let start = tables.queries.len();
            tables.queries.resize(start + dim, 0.0);
            tables.offsets.push(side.fold_query(&raw, &mut tables.queries[start..]));
        }
    }
}
