//! Which candidate each layer and side gets: least cost within a budget of bits.

use anyhow::{Result, ensure};

/// One candidate on one slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SlotChoice {
    /// Index of the candidate.
    pub(super) candidate: usize,
    /// Bits per value there.
    pub(super) bits: f64,
    /// Expected loss of quality.
    pub(super) cost: f64,
}

/// One choice per slot whose mean bits stay within `budget`, by greatest saving of cost per bit:
/// every slot begins with its cheapest candidate and climbs its convex hull, on which that is the
/// best for each budget that a step ends at.
///
/// # Errors
/// When even the cheapest candidates take more than the budget.
pub(super) fn assign_choices(slots: &[Vec<SlotChoice>], budget: f64) -> Result<Vec<SlotChoice>> {
    let hulls: Vec<Vec<SlotChoice>> = slots.iter().map(|choices| lower_hull(choices)).collect();
    ensure!(hulls.iter().all(|hull| !hull.is_empty()), "a slot without a candidate");
    let mut at = vec![0; hulls.len()];
    let mut left = budget * hulls.len() as f64 - hulls.iter().map(|hull| hull[0].bits).sum::<f64>();
    ensure!(
        left >= 0.0,
        "the candidates take {:.2} bits per value at least; the budget is {budget}",
        budget - left / hulls.len() as f64
    );
    // Steps of a slot come in the order of its hull, so that the best next step is among these.
    loop {
        let step = |slot: usize| {
            let (now, next) = (hulls[slot][at[slot]], *hulls[slot].get(at[slot] + 1)?);
            let bits = next.bits - now.bits;
            (bits <= left).then_some((slot, bits, (now.cost - next.cost) / bits))
        };
        let steps = (0..hulls.len()).filter_map(step);
        let Some((slot, bits, _)) = steps.max_by(|a, b| a.2.total_cmp(&b.2)) else { break };
        at[slot] += 1;
        left -= bits;
    }
    Ok(hulls.iter().zip(at).map(|(hull, at)| hull[at]).collect())
}

/// The lower convex hull, by growing bits and falling cost.
fn lower_hull(choices: &[SlotChoice]) -> Vec<SlotChoice> {
    let mut sorted = choices.to_vec();
    sorted.sort_by(|a, b| a.bits.total_cmp(&b.bits).then(a.cost.total_cmp(&b.cost)));
    let mut hull: Vec<SlotChoice> = Vec::new();
    for choice in sorted {
        if hull.last().is_some_and(|last| choice.cost >= last.cost) {
            continue;
        }
        let slope = |a: &SlotChoice, b: &SlotChoice| (a.cost - b.cost) / (b.bits - a.bits);
        // The middle one is passed over when the way straight past it saves faster.
        while let [.., before, last] = &hull[..]
            && slope(before, last) <= slope(before, &choice)
        {
            hull.pop();
        }
        hull.push(choice);
    }
    hull
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates of 1, 2, 3 and 4 bits whose cost falls by 4 for each bit.
    fn slot(weight: f64) -> Vec<SlotChoice> {
        let choice = |candidate: usize| {
            let bits = 1.0 + candidate as f64;
            SlotChoice { candidate, bits, cost: weight * 4f64.powf(-bits) }
        };
        (0..4).map(choice).collect()
    }

    fn bits(slots: &[Vec<SlotChoice>], budget: f64) -> Vec<f64> {
        assign_choices(slots, budget).unwrap().iter().map(|choice| choice.bits).collect()
    }

    #[test]
    fn equal_slots_share_equally() {
        let slots = vec![slot(1.0); 4];
        assert_eq!(bits(&slots, 2.0), [2.0; 4]);
        assert_eq!(bits(&slots, 4.0), [4.0; 4]);
        assert_eq!(bits(&slots, 9.0), [4.0; 4]);
    }

    #[test]
    fn a_sensitive_slot_gets_a_bit_more_per_factor_of_four() {
        let slots = [slot(16.0), slot(1.0), slot(4.0)];
        assert_eq!(bits(&slots, 3.0), [4.0, 2.0, 3.0]);
        let spent: f64 = bits(&slots, 2.5).iter().sum();
        assert!(spent <= 7.5, "{spent}");
    }

    #[test]
    fn what_costs_more_and_saves_nothing_is_never_chosen() {
        let mut choices = slot(1.0);
        choices.push(SlotChoice { candidate: 9, bits: 2.5, cost: 1.0 });
        // Between 2 and 3 bits, but above the line from one to the other.
        choices.push(SlotChoice { candidate: 8, bits: 2.9, cost: 4f64.powf(-2.0) * 0.99 });
        assert_eq!(lower_hull(&choices), slot(1.0));
    }

    #[test]
    fn the_greedy_choice_is_the_best_of_all_at_its_own_bits() {
        let slots: Vec<_> = [3.0, 0.2, 11.0, 1.5].map(slot).to_vec();
        let chosen = assign_choices(&slots, 2.5).unwrap();
        let total =
            |pick: &[SlotChoice]| pick.iter().fold((0.0, 0.0), |t, c| (t.0 + c.bits, t.1 + c.cost));
        let (spent, cost) = total(&chosen);
        for code in 0..256usize {
            let pick: Vec<_> = (0..4).map(|i| slots[i][code >> (2 * i) & 3]).collect();
            let (other_bits, other_cost) = total(&pick);
            assert!(other_bits > spent || other_cost >= cost - 1e-12, "{pick:?}");
        }
    }

    #[test]
    fn a_budget_below_the_cheapest_names_what_is_needed() {
        let error = assign_choices(&[slot(1.0), slot(1.0)], 0.5).unwrap_err().to_string();
        assert!(error.contains("1.00 bits") && error.contains("0.5"), "{error}");
    }
}
