// SPDX-License-Identifier: Apache-2.0

//! The rules of the model, each under the name of what it promises. `build` makes the objects, `stage` lets them
//! happen; the rest are tables.

mod build;
mod claims;
mod dump;
mod flows;
mod frontends;
mod health;
mod lists;
mod matrix;
mod node_ports;
mod node_wide;
mod ranges;
mod reference;
mod selection;
mod sequences;
mod stage;
mod universe;
mod weights;
