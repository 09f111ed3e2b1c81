//! Exact answers to small scripts: figures, limits, orders and texts that random operations do not
//! see, or see too seldom.
#![cfg(not(loom))]

mod arrays;
mod budgets;
mod cancelling;
mod direct;
mod drafts;
mod errors;
mod events;
mod eviction;
mod explain;
mod figures;
mod filling;
mod handles;
mod keeping;
mod limits;
mod partial;
mod rematch;
mod replays;
mod sharing;
mod snapshot;
mod states;
mod statistics;
mod switches;
mod tables;
mod threads;
mod tools;
mod transfers;
mod versions;
mod windows;
