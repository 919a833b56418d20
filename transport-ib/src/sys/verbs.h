/* What ci/ib-bindings.sh makes src/sys/bindings.rs from: the types of the verbs interface, and a type for each function
 * that this crate takes from the library. */
#include <infiniband/verbs.h>

#define TAKE(function) typedef __typeof__(function) function##_fn

TAKE(ibv_get_device_list);
TAKE(ibv_free_device_list);
TAKE(ibv_get_device_name);
TAKE(ibv_open_device);
TAKE(ibv_close_device);
TAKE(ibv_query_device);
TAKE(ibv_query_port);
TAKE(ibv_query_gid);
TAKE(_ibv_query_gid_table);
TAKE(ibv_alloc_pd);
TAKE(ibv_dealloc_pd);
TAKE(ibv_reg_mr);
TAKE(ibv_reg_mr_iova2);
TAKE(ibv_reg_dmabuf_mr);
TAKE(ibv_dereg_mr);
TAKE(ibv_create_cq);
TAKE(ibv_destroy_cq);
TAKE(ibv_create_qp);
TAKE(ibv_modify_qp);
TAKE(ibv_destroy_qp);
TAKE(ibv_get_async_event);
TAKE(ibv_ack_async_event);
