// The four halves on the CPU. Each returns a status whose code is not kOk if a wait failed. Bad arguments
// throw BadArgument before anything is sent.
#pragma once

#include "exchange/common/group.hpp"
#include "exchange/common/params.hpp"

namespace ep::cpu {

Status dispatch_send(Group& group, const DispatchSendParams& params, DispatchState& state);

// The waiting half of a receive: afterwards counts, offsets and entries of `state` are known.
Status dispatch_wait(Group& group, DispatchState& state);

// The copying half: fills the view; returns the bank to the senders unless the view reads it in place.
void dispatch_expand(Group& group, DispatchState& state, const ExpandParams& params);

// Returns the bank of an in-place view; without effect on other views and the second time.
void dispatch_release(Group& group, DispatchState& state);

Status combine_send(Group& group, const CombineSendParams& params, CombineState& state);

// Where rows are on a device, the sums are left to it: see sum_table(); then the bank is held until they are
// done.
Status combine_recv(Group& group, const CombineRecvParams& params, CombineState& state);

// Returns the bank of a combine whose rows are on a device; without effect on others and the second time.
void combine_release(Group& group, CombineState& state);

}  // namespace ep::cpu
