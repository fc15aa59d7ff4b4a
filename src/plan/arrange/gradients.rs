//! Gradients in pieces, each made just before its part of the update.
//!
//! Where the first layer shares its weights with the last one, as in most language models, the
//! gradient is the sum of two that take as much memory as it does. Sum and update are both
//! elementwise, so they run in turn, piece by piece, and there is never more than a piece of the
//! sum. The same holds for the conversion of a gradient to the type of a master weight.

use super::makers::in_pieces;
use super::{Candidate, PIECE, arrangement};
use crate::budget::Request;
use crate::job::arrange::{Arrangement, Moved, Pieces, splittable};
use crate::method::Method;
use crate::units::OpId;

/// The job with its updates early and in pieces, and gradients whole, where [`cut`] would change
/// that: while the pieces run, both summands take memory, and with a whole gradient only that does.
pub(super) fn whole(request: &Request<'_>) -> Option<Candidate> {
    let whole = arrangement(request, PIECE)?;
    let mut other = whole.clone();
    cut(request, &mut other);
    if whole == other { None } else { Candidate::new(request, &whole) }
}

/// Lets gradients of updates that are in pieces come in pieces too, where the update runs right
/// behind what makes its gradient, and the planner may do it.
pub(super) fn cut(request: &Request<'_>, arrangement: &mut Arrangement) {
    let Method::Neap(options) = &request.method else { return };
    if !options.split_gradients || !options.reorder {
        return;
    }
    let graph = request.graph;
    for (update, maker) in in_pieces(graph) {
        let of = |pieces: &&Pieces| pieces.operator == update;
        let Some(elements) = arrangement.pieces.iter().find(of).map(|of| of.elements) else {
            continue;
        };
        let Some(count) = splittable(graph, update).ok().map(|all| all.div_ceil(elements)) else {
            continue;
        };
        let order = &mut arrangement.order;
        let moves: Vec<OpId> =
            order.iter().filter(|m| m.piece.is_none()).map(|m| m.operator).collect();
        if moves.contains(&maker) || order.iter().any(|m| m.operator == update && m.piece.is_some())
        {
            continue;
        }
        let stays = |at: usize| !moves.contains(&OpId::of(at));
        let at = match order.iter().position(|m| m.operator == update) {
            Some(at) if order[at].after == Some(maker) => {
                order.remove(at);
                at
            }
            None if !(maker.index() + 1..update.index()).any(stays) => order.len(),
            _ => continue,
        };
        let after = (0..maker.index()).rev().find(|at| stays(*at)).map(OpId::of);
        let pair =
            |number| [maker, update].map(|operator| Moved { operator, piece: Some(number), after });
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        order.splice(at..at, (0..count).flat_map(pair));
        arrangement.pieces.push(Pieces { operator: maker, elements });
    }
}
