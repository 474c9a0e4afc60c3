//! Rows that most tests store, and questions about them in every order of threads.

use super::reference::{check, expected};
use super::run::run;
use super::{Ask, Layout, Stored, noise, orders};
use kvd_core::Side;
use kvd_emu::ThreadOrder;

/// Roughly normal rows, one channel much larger than the others.
pub(crate) fn value(side: Side, head: usize, token: usize, channel: usize) -> f32 {
    let index = ((side.index() * 2 + head) * 4096 + token) * 512 + channel;
    noise(index) * if channel == 3 { 8.0 } else { 1.0 }
}

pub(crate) fn layout(pages: &[usize], window: usize) -> Layout {
    Layout { pages: pages.to_vec(), window }
}

/// Asks in every order of threads, with every part a unit of its own and with all in one.
pub(crate) fn agree(stored: &Stored, ask: &Ask, what: &str) {
    let plan = ask.plan(stored, |i| 2.0 * noise(77_777 + i));
    let wanted = expected(stored, &plan);
    let rounds = ThreadOrder::EACH.into_iter().zip([1, 100, 2]);
    for (order, parts_per_unit) in rounds.filter(|round| orders().any(|order| order == round.0)) {
        let answer = run(stored, &plan, parts_per_unit, order).unwrap();
        let what = format!("{what}, {ask:?}, {order:?}, {parts_per_unit} parts");
        check(&answer, &wanted, &what);
    }
}

/// The kernel of a pair for so many channels and query rows: with the shapes of `fixed` as
/// constants, where there is one.
pub(crate) fn kernel(pair: &str, fixed: Option<&str>, (dim, rows): (usize, usize)) -> String {
    match fixed {
        // Where a warp owns tokens fewer rows leave columns empty.
        Some(fixed @ ("kivi4" | "kivi2")) if dim <= 128 => {
            let of_dim = if dim == 64 { "_64" } else { "" };
            format!("kvd_attend_{fixed}{of_dim}_{}", rows.next_multiple_of(4))
        }
        Some(fixed) if (dim, rows) == (128, 4) => format!("kvd_attend_{fixed}_4"),
        _ if pair.ends_with("any_any") => format!("kvd_attend_{pair}_8"),
        _ => format!("kvd_attend_{pair}_{rows}"),
    }
}
