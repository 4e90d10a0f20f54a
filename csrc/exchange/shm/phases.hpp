// The four halves on the CPU. If a wait fails, the returned status has a code other than kOk. Bad arguments
// throw BadArgument before anything is sent.
#pragma once

#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"

namespace ep::cpu {

Status dispatch_send(Group& group, const DispatchSendParams& params, DispatchState& state);

// The waiting half of a receive. It fills counts, offsets and entries of `state`.
Status dispatch_wait(Group& group, DispatchState& state);

// The copying half. It fills the view, and returns the bank to the senders unless the view reads it in place.
void dispatch_expand(Group& group, DispatchState& state, const ExpandParams& params);

// Returns the bank of an in-place view. No effect on other views, or when called again.
void dispatch_release(Group& group, DispatchState& state);

Status combine_send(Group& group, const CombineSendParams& params, CombineState& state);

// If rows are on a device, the device computes the sums: see sum_table(). The bank is held until they are
// done.
Status combine_recv(Group& group, const CombineRecvParams& params, CombineState& state);

// Returns the bank of a combine whose rows are on a device. No effect on other combines, or when called
// again.
void combine_release(Group& group, CombineState& state);

}  // namespace ep::cpu
