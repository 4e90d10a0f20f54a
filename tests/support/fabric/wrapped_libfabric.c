// A libfabric.so.1 around another one, for tests on a machine that has no card: it records what it is asked
// for, calls a provider by another name, takes capabilities away, and demands what production networks
// demand. Compiled by wrapped.py; what it does is said by macros:
//   REAL            the libfabric behind it; BELOW: the provider in it, as it calls it
//   RECORD          file: "env NAME=VALUE" when it is loaded, "hint NAME=VALUE" whenever it is asked,
//                   "write PROCESS PEER" for the first write of each endpoint to a peer, "device PROCESS KIND NUMBER
//                   BEGIN BYTES" for memory of a device that is registered, and "device_write PROCESS FROM" for
//                   the first writes from it
//   HMEM            0, or it reaches the memory of devices where it is asked to; REFUSED: registering it fails
//   NAME            how it calls BELOW
//   LACKS           capabilities that are not there
//   CQ_DATA         bytes of remote completion data; what exceeds them is cut off
//   MOST_WRITES     the largest transmit queue
//   EMULATED        -1, or what the endpoint says of emulated writes: 0, 1
//   P2P, CUDA_CALLS what the endpoint says where it must reach a device's memory without copies
//                   (FI_OPT_FI_HMEM_P2P), and without calls of CUDA's: 0 = granted, an errno, -1 = it does not
//                   know the option
//   STRICT          registration by virtual address, with keys of the provider, before anything is sent;
//                   MOST_RECEIVES receives, of which each remote write with data uses up one
//   FAILING         so many writes of each endpoint, its first ones, end in an error and are never sent
//   BROKEN_WAIT     the descriptor to sleep on is always in error
#define _GNU_SOURCE
#include "wrapped_entry.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>
#include <unistd.h>

enum { ENDS = 64, HELD = 1 << 16, REGIONS = 4096, NOTED = 32 };
// Of libfabric since 1.18.
enum { EFA_EMULATED_WRITE = -(0xefa << 16) + 2, CUDA_API_PERMITTED = 10 };

// -- what an endpoint demands ------------------------------------------------------------------------------

static struct end {
  struct fid_domain* domain;
  struct fid_ep* endpoint;
  struct fid_cq* queue;
  void* receives[MOST_RECEIVES];  // posted, a ring
  size_t posted, used;
  struct fi_cq_data_entry held[HELD];  // arrived, and no receive was there
  size_t first, last;
  void* failed[FAILING + 1];  // contexts of writes
  size_t failures, failures_told;
  uint64_t noted;       // bits of peers that were written to
  size_t device_noted;  // writes
} ends[ENDS];
static size_t num_ends, num_regions;
static struct {
  const char* begin;
  size_t bytes;
  void* desc;
  bool device;
} regions[REGIONS];

static struct fi_ops_fabric fabric_ops, *fabric_below;
static struct fi_ops_domain domain_ops, *domain_below;
static struct fi_ops_mr mr_ops, *mr_below;
static struct fi_ops_cq cq_ops, *cq_below;
static struct fi_ops queue_ops, *queue_below;
static struct fi_ops_rma rma_ops, *rma_below;
static struct fi_ops_msg msg_ops, *msg_below;
static struct fi_ops_ep ep_ops, *ep_below;

#define REPLACE(object, member, mine, below, one, with) \
  do {                                                  \
    if ((below) == NULL) (below) = (object)->member;    \
    (mine) = *(below);                                  \
    (mine).one = (with);                                \
    (object)->member = &(mine);                         \
  } while (0)

static struct end* of_queue(const struct fid_cq* queue) {
  for (size_t i = num_ends; i-- > 0;)
    if (ends[i % ENDS].queue == queue) return &ends[i % ENDS];
  abort();
}

static struct end* of_endpoint(const struct fid_ep* endpoint) {
  for (size_t i = num_ends; i-- > 0;)
    if (ends[i % ENDS].endpoint == endpoint) return &ends[i % ENDS];
  abort();
}

static ssize_t receive(struct fid_ep* endpoint, void* buffer, size_t bytes, void* desc, fi_addr_t from,
                       void* context) {
  struct end* end = of_endpoint(endpoint);
  (void)buffer, (void)bytes, (void)desc, (void)from;
  if (end->posted - end->used == MOST_RECEIVES) return -FI_EAGAIN;
  end->receives[end->posted++ % MOST_RECEIVES] = context;
  return 0;
}

// As a card does: each remote write with data takes a receive, and waits where there is none.
static ssize_t read_strict(struct fid_cq* queue, void* buffer, size_t room) {
  struct end* end = of_queue(queue);
  struct fi_cq_data_entry *out = buffer, fresh[64];
  const ssize_t count = cq_below->read(queue, fresh, room < 64 ? room : 64);
  size_t given = 0;
  for (ssize_t i = 0; i < count; ++i) {
    if ((fresh[i].flags & FI_REMOTE_CQ_DATA) == 0) {
      out[given++] = fresh[i];
      continue;
    }
    if (end->last - end->first == HELD) abort();
    end->held[end->last++ % HELD] = fresh[i];
  }
  for (; given < room && end->first != end->last && end->used != end->posted; ++given) {
    out[given] = end->held[end->first++ % HELD];
    out[given].op_context = end->receives[end->used++ % MOST_RECEIVES];
    if (CQ_DATA < 8) out[given].data &= (1ull << (CQ_DATA * 8 % 64)) - 1;
  }
  if (given != 0) return (ssize_t)given;
  return count < 0 ? count : -FI_EAGAIN;
}

static ssize_t read_queue(struct fid_cq* queue, void* buffer, size_t room) {
  const struct end* end = of_queue(queue);
  if (end->failures_told < end->failures) return -FI_EAVAIL;
  return STRICT ? read_strict(queue, buffer, room) : cq_below->read(queue, buffer, room);
}

static ssize_t read_error(struct fid_cq* queue, struct fi_cq_err_entry* entry, uint64_t flags) {
  struct end* end = of_queue(queue);
  if (end->failures_told == end->failures) return cq_below->readerr(queue, entry, flags);
  entry->op_context = end->failed[end->failures_told++];
  entry->flags = FI_RMA | FI_WRITE;
  entry->err = FI_ECONNREFUSED;
  return 1;
}

// A pipe that nobody reads.
static int control(struct fid* queue, int command, void* argument) {
  int ends_of_pipe[2];
  if (!BROKEN_WAIT || command != FI_GETWAIT) return queue_below->control(queue, command, argument);
  if (pipe(ends_of_pipe) != 0) abort();
  close(ends_of_pipe[0]);
  *(int*)argument = ends_of_pipe[1];
  return 0;
}

static int try_wait(struct fid_fabric* fabric, struct fid** objects, int count) {
  for (size_t i = 0; i < ENDS; ++i) {
    const struct end* end = &ends[i];
    if (end->queue == NULL || &end->queue->fid != objects[0]) continue;
    if (end->failures_told < end->failures) return -FI_EAGAIN;
    if (end->first != end->last && end->used != end->posted) return -FI_EAGAIN;
  }
  return fabric_below->trywait(fabric, objects, count);
}

// What is sent lies in memory that was registered, and its descriptor comes with it.
static ssize_t write_strict(struct fid_ep* endpoint, const struct fi_msg_rma* message, uint64_t flags) {
  const char* from = message->msg_iov[0].iov_base;
  bool good = message->data >> 32 == 0;
  for (size_t i = 0; good && i < num_regions; ++i)
    if (message->desc != NULL && message->desc[0] == regions[i].desc && from >= regions[i].begin &&
        from + message->msg_iov[0].iov_len <= regions[i].begin + regions[i].bytes)
      return rma_below->writemsg(endpoint, message, flags);
  return -FI_EINVAL;
}

static long region_of(const char* from) {
  for (size_t i = num_regions; i-- > 0;)
    if (from >= regions[i].begin && from < regions[i].begin + regions[i].bytes) return (long)i;
  return -1;
}

// What is sent from a device comes with the descriptor of its registration, and only that.
static bool described(const struct fi_msg_rma* message) {
  const long i = region_of(message->msg_iov[0].iov_base);
  if (i < 0 || !regions[i].device) return true;
  return message->desc != NULL && message->desc[0] == regions[i].desc;
}

static void note_device_write(struct end* end, const char* from) {
  const long i = region_of(from);
  if (i < 0 || !regions[i].device || end->device_noted == NOTED) return;
  char text[64];
  snprintf(text, sizeof text, "%d %llu", (int)getpid(), (unsigned long long)(uintptr_t)from);
  note("device_write", text);
  ++end->device_noted;
}

static ssize_t write_message(struct fid_ep* endpoint, const struct fi_msg_rma* message, uint64_t flags) {
  struct end* end = of_endpoint(endpoint);
  const uint64_t peer = message->addr < 64 ? 1ull << message->addr : 0;
  if ((peer & ~end->noted) != 0) {
    char text[64];
    snprintf(text, sizeof text, "%d %llu", (int)getpid(), (unsigned long long)message->addr);
    note("write", text);
    end->noted |= peer;
  }
  if (end->failures != FAILING) {
    end->failed[end->failures++] = message->context;
    return 0;
  }
  if (!described(message)) return -FI_EINVAL;
  note_device_write(end, message->msg_iov[0].iov_base);
  return STRICT ? write_strict(endpoint, message, flags) : rma_below->writemsg(endpoint, message, flags);
}

static int register_memory(struct fid* domain, const void* buffer, size_t bytes, uint64_t access,
                           uint64_t offset, uint64_t key, uint64_t flags, struct fid_mr** made,
                           void* context) {
  const int result = mr_below->reg(domain, buffer, bytes, access, offset, key, flags, made, context);
  if (result != 0 || num_regions == REGIONS) return result;
  (*made)->mem_desc = *made;  // the provider below has none
  regions[num_regions].begin = buffer;
  regions[num_regions].bytes = bytes;
  regions[num_regions].device = false;
  regions[num_regions++].desc = *made;
  return 0;
}

// The provider below is told of host memory.
static int register_device(struct fid* domain, const struct fi_mr_attr* attr, uint64_t flags,
                           struct fid_mr** made) {
  char text[128];
  const struct iovec* at = attr->mr_iov;
  snprintf(text, sizeof text, "%d %d %d %llu %zu", (int)getpid(), (int)attr->iface, attr->device.cuda,
           (unsigned long long)(uintptr_t)at->iov_base, at->iov_len);
  note("device", text);
  if (REFUSED) return -FI_ENOSYS;
  const int result = register_memory(domain, at->iov_base, at->iov_len, attr->access, attr->offset,
                                     attr->requested_key, flags, made, attr->context);
  if (result == 0) regions[num_regions - 1].device = true;
  return result;
}

static int get_option(struct fid* endpoint, int level, int name, void* value, size_t* length) {
  if (EMULATED < 0 || level != FI_OPT_ENDPOINT || name != EFA_EMULATED_WRITE)
    return ep_below->getopt(endpoint, level, name, value, length);
  *(bool*)value = EMULATED;
  *length = sizeof(bool);
  return 0;
}

static int granted(int result) { return result < 0 ? -FI_ENOPROTOOPT : -result; }

static int set_option(struct fid* endpoint, int level, int name, const void* value, size_t length) {
  if (level == FI_OPT_ENDPOINT && name == FI_OPT_FI_HMEM_P2P && length == sizeof(int))
    return *(const int*)value == FI_HMEM_P2P_REQUIRED ? granted(P2P) : -FI_EINVAL;
  if (level == FI_OPT_ENDPOINT && name == CUDA_API_PERMITTED && length == sizeof(bool))
    return *(const bool*)value ? -FI_EINVAL : granted(CUDA_CALLS);
  return ep_below->setopt(endpoint, level, name, value, length);
}

// -- where these come from ---------------------------------------------------------------------------------

static int open_queue(struct fid_domain* domain, struct fi_cq_attr* attr, struct fid_cq** queue,
                      void* context) {
  const int result = domain_below->cq_open(domain, attr, queue, context);
  if (result != 0) return result;
  struct end* end = &ends[num_ends++ % ENDS];
  *end = (struct end){.domain = domain, .queue = *queue};
  REPLACE(*queue, ops, cq_ops, cq_below, read, read_queue);
  cq_ops.readerr = read_error;
  REPLACE(&(*queue)->fid, ops, queue_ops, queue_below, control, control);
  return 0;
}

static int open_endpoint(struct fid_domain* domain, struct fi_info* info, struct fid_ep** endpoint,
                         void* context) {
  // The provider below opens its connections this way too.
  if (info->ep_attr->type != FI_EP_RDM) return domain_below->endpoint(domain, info, endpoint, context);
  struct fi_info* plain = unmask(info);
  const int result = domain_below->endpoint(domain, plain, endpoint, context);
  real_freeinfo(plain);
  if (result != 0) return result;
  REPLACE(*endpoint, ops, ep_ops, ep_below, getopt, get_option);
  ep_ops.setopt = set_option;
  for (size_t i = num_ends; i-- > 0;)
    if (ends[i % ENDS].domain == domain) {
      ends[i % ENDS].endpoint = *endpoint;
      break;
    }
  REPLACE(*endpoint, rma, rma_ops, rma_below, writemsg, write_message);
  if (STRICT) REPLACE(*endpoint, msg, msg_ops, msg_below, recv, receive);
  return 0;
}

static int open_domain(struct fid_fabric* fabric, struct fi_info* info, struct fid_domain** domain,
                       void* context) {
  struct fi_info* plain = unmask(info);
  const int result = fabric_below->domain(fabric, plain, domain, context);
  real_freeinfo(plain);
  if (result != 0) return result;
  REPLACE(*domain, ops, domain_ops, domain_below, endpoint, open_endpoint);
  domain_ops.cq_open = open_queue;
  if (STRICT || HMEM) REPLACE(*domain, mr, mr_ops, mr_below, reg, register_memory);
  mr_ops.regattr = register_device;
  return 0;
}

int fi_fabric(struct fi_fabric_attr* attr, struct fid_fabric** fabric, void* context) {
  char* shown = attr->prov_name;
  attr->prov_name = strdup(BELOW);
  const int result = real_fabric(attr, fabric, context);
  free(attr->prov_name);
  attr->prov_name = shown;
  if (result != 0) return result;
  REPLACE(*fabric, ops, fabric_ops, fabric_below, domain, open_domain);
  fabric_ops.trywait = try_wait;
  return 0;
}
