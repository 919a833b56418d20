//! [`Verbs`]: the functions of `libibverbs.so.1`, found when the transport is opened.

use std::sync::Arc;

use libloading::Library;

use crate::error::Error;
use crate::sys;

/// What bindgen wraps in `Option`, bare.
mod bare {
    pub trait Function {
        type Bare: Copy;
    }
    impl<F: Copy> Function for Option<F> {
        type Bare = F;
    }
}

type Bare<F> = <F as bare::Function>::Bare;

/// The library's name: that of its interface's only version so far.
const LIBRARY: &str = "libibverbs.so.1";

macro_rules! tables {
    (required { $($name:ident: $type:ident = $symbol:literal,)* } optional { $($may:ident: $may_type:ident = $may_symbol:literal,)* }) => {
        /// The functions that this crate calls. Each has the type that the verbs header gives it; those that old
        /// libraries lack are options. The data path goes through the tables in `ibv_context` instead.
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "named as in the verbs interface, where they are described")]
        pub struct Table {
            $(pub $name: Bare<sys::$type>,)*
            $(pub $may: sys::$may_type,)*
        }

        impl Table {
            fn find(library: &Library) -> Result<Table, Error> {
                Ok(Table {
                    $($name: {
                        // SAFETY: the type is the one that the header declares for this symbol.
                        let found = unsafe { library.get::<Bare<sys::$type>>($symbol) };
                        *found.map_err(|error| Error::NoLibrary { message: format!("{LIBRARY}: {error}") })?
                    },)*
                    $($may: {
                        // SAFETY: as above.
                        unsafe { library.get::<Bare<sys::$may_type>>($may_symbol) }.ok().map(|found| *found)
                    },)*
                })
            }
        }
    };
}

tables! {
    required {
        get_device_list: ibv_get_device_list_fn = b"ibv_get_device_list\0",
        free_device_list: ibv_free_device_list_fn = b"ibv_free_device_list\0",
        get_device_name: ibv_get_device_name_fn = b"ibv_get_device_name\0",
        open_device: ibv_open_device_fn = b"ibv_open_device\0",
        close_device: ibv_close_device_fn = b"ibv_close_device\0",
        query_device: ibv_query_device_fn = b"ibv_query_device\0",
        query_port: ibv_query_port_fn = b"ibv_query_port\0",
        query_gid: ibv_query_gid_fn = b"ibv_query_gid\0",
        alloc_pd: ibv_alloc_pd_fn = b"ibv_alloc_pd\0",
        dealloc_pd: ibv_dealloc_pd_fn = b"ibv_dealloc_pd\0",
        reg_mr: ibv_reg_mr_fn = b"ibv_reg_mr\0",
        dereg_mr: ibv_dereg_mr_fn = b"ibv_dereg_mr\0",
        create_cq: ibv_create_cq_fn = b"ibv_create_cq\0",
        destroy_cq: ibv_destroy_cq_fn = b"ibv_destroy_cq\0",
        create_qp: ibv_create_qp_fn = b"ibv_create_qp\0",
        modify_qp: ibv_modify_qp_fn = b"ibv_modify_qp\0",
        destroy_qp: ibv_destroy_qp_fn = b"ibv_destroy_qp\0",
        get_async_event: ibv_get_async_event_fn = b"ibv_get_async_event\0",
        ack_async_event: ibv_ack_async_event_fn = b"ibv_ack_async_event\0",
    }
    optional {
        query_gid_table: _ibv_query_gid_table_fn = b"_ibv_query_gid_table\0",
        reg_mr_iova2: ibv_reg_mr_iova2_fn = b"ibv_reg_mr_iova2\0",
        reg_dmabuf_mr: ibv_reg_dmabuf_mr_fn = b"ibv_reg_dmabuf_mr\0",
    }
}

/// The verbs interface: the loaded library, or a table that somebody else filled.
#[derive(Clone, Debug)]
pub struct Verbs {
    table: Table,
    /// Keeps the code of `table` mapped.
    _library: Option<Arc<Library>>,
}

impl Verbs {
    /// Loads `libibverbs.so.1`.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] if it is not there or lacks a function that this crate needs.
    pub fn load() -> Result<Self, Error> {
        Verbs::load_from(LIBRARY)
    }

    fn load_from(name: &str) -> Result<Self, Error> {
        // SAFETY: the library's constructors are those that every program linked to it runs.
        let library = unsafe { Library::new(name) };
        let library = library.map_err(|error| Error::NoLibrary { message: error.to_string() })?;
        let table = Table::find(&library)?;
        Ok(Verbs { table, _library: Some(Arc::new(library)) })
    }

    /// Takes the functions from a table instead of a library: for tests, or a library that is linked in.
    ///
    /// # Safety
    /// - Every function behaves as the verbs interface describes it, and so do those in the tables of the contexts that
    ///   `open_device` returns.
    /// - They may be called from any thread until the process ends.
    pub unsafe fn from_table(table: Table) -> Self {
        Verbs { table, _library: None }
    }

    /// The functions.
    pub fn table(&self) -> &Table {
        &self.table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_an_answer() {
        let error = Verbs::load_from("libibverbs-not-there.so.1").unwrap_err();
        let Error::NoLibrary { message } = error else { panic!("{error:?}") };
        assert!(message.contains("libibverbs-not-there.so.1"), "{message}");
    }

    #[test]
    fn a_library_that_lacks_a_function_is_named_with_it() {
        // The C library is on every machine and is no verbs library.
        let error = Verbs::load_from("libc.so.6").unwrap_err();
        let Error::NoLibrary { message } = error else { panic!("{error:?}") };
        assert!(message.contains("ibv_get_device_list"), "{message}");
    }
}
