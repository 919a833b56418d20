//! Events of a proxy's life for the subscribers of `tracing`, by the feature of that name; without it, nothing.
//!
//! They come from the threads that call a [`Proxy`](crate::Proxy), never from the engine's: a subscriber may allocate, lock
//! and block. A panic of one goes no further: a proxy tells how it has stopped from its drop, where a second panic would end
//! the process, and what a call has done is not to be lost for its event.

#[cfg(feature = "tracing")]
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(feature = "tracing")]
use crate::engine;
use crate::error::Error;
#[cfg(feature = "tracing")]
use crate::runner::Report;

/// Tells of a call's end, and hands its result on.
pub(crate) fn told<T>(call: &'static str, result: Result<T, Error>) -> Result<T, Error> {
    #[cfg(feature = "tracing")]
    guarded(|| match &result {
        Ok(_) => tracing::debug!(call, "done"),
        Err(error) => tracing::warn!(call, %error, "failed"),
    });
    #[cfg(not(feature = "tracing"))]
    let _ = call;
    result
}

/// Tells how a proxy has stopped, and of each channel that had ended before it.
#[cfg(feature = "tracing")]
pub(crate) fn stopped(report: &Report, engine: &engine::Shared) {
    guarded(|| {
        for channel in engine.channels() {
            match channel.error() {
                None | Some(crate::ChannelError::Stopped { .. }) => {}
                Some(error) => tracing::warn!(%error, "a channel had ended"),
            }
        }
        let Report { drained, cancelled, quiesced, quarantined, stats } = report;
        let (triggers, completions) = (stats.triggers, stats.completions);
        if quarantined.is_empty() {
            tracing::info!(drained, cancelled, quiesced, triggers, completions, "the proxy has stopped");
        } else {
            tracing::error!(
                ?quarantined,
                cancelled,
                triggers,
                "the proxy has stopped without threads of its own"
            );
        }
    });
}

/// The panic hook has said what a subscriber panicked with. Nothing that is used after it was being changed.
#[cfg(feature = "tracing")]
fn guarded(tell: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(tell));
}
