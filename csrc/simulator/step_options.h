// What a simulated step does beyond its costs. Plain values.
#pragma once

namespace pipetransformer::simulator {

// Where and when the frozen layers run.
enum class PrefixMode {
  // All micro-batches before the first F, placed as the costs say; where these
  // say kFilled as below.
  kBarrier,
  // The same, all on the first device: the paper's way.
  kSerial,
  // Whatever the costs say: those of the next step, in the pipeline's gaps on
  // all devices: the frozen
  // forward does not depend on this step's update. What does not fit follows
  // the step, spread over the devices.
  kFilled,
};

struct StepOptions {
  PrefixMode prefix = PrefixMode::kBarrier;
  // F of micro-batch i also waits for F of i-2 on the stage after it. On a
  // device it orders the host's launches and costs the device no time.
  bool at_most_one_ahead = false;
  bool keep_timeline = false;
};

}  // namespace pipetransformer::simulator
