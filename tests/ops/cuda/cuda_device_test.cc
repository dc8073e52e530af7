// Devices, events and streams, over a table that keeps what the real ones keep.
#include "ops/cuda/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "ops/cuda/device_work.h"
#include "ops/cuda/kernels.h"
#include "tests/support/fake_gpus.h"

namespace sirtaki::ops::cuda {
namespace {

using core::Status;
using core::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using tests::FakeGpus;

class CudaDeviceTest : public ::testing::Test {
 protected:
  std::shared_ptr<Device> Open(int index) {
    std::shared_ptr<Device> device;
    const Status status = Device::Open(gpus_.cuda(), index, &device);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return device;
  }
  EventPtr Take(EventPool& pool) {
    EventPtr event;
    EXPECT_TRUE(pool.Take(&event).ok());
    return event;
  }

  FakeGpus gpus_;
};

TEST_F(CudaDeviceTest, MakesAContextOnNoOtherDevice) {
  // The thread of a program that has never chosen a device, and whose tensor is on another than 0.
  const std::shared_ptr<Device> device = Open(3);
  EventPool pool(device);
  const EventPtr event = Take(pool);
  EXPECT_EQ(gpus_.current_device(), -1);
  EXPECT_THAT(gpus_.devices_with_context(), ElementsAre(3));
  EXPECT_TRUE(gpus_.calls("cudaSetDevice").empty());
}

TEST_F(CudaDeviceTest, AnEventGoesWithoutAContextOnAnotherDevice) {
  const std::shared_ptr<Device> device = Open(3);
  auto pool = std::make_unique<EventPool>(device);
  EventPtr last = Take(*pool);
  Take(*pool);  // and back
  std::thread([&] {
    pool.reset();
    EXPECT_EQ(gpus_.live_events(), 1);
    last.reset();
  }).join();
  EXPECT_EQ(gpus_.live_events(), 0);
  EXPECT_THAT(gpus_.devices_with_context(), ElementsAre(3));
}

TEST_F(CudaDeviceTest, AThreadOfOursTakesTheDevice) {
  const std::shared_ptr<Device> device = Open(2);
  std::thread([&] {
    ASSERT_TRUE(device->Adopt().ok());
    EXPECT_EQ(gpus_.current_device(), 2);
    std::unique_ptr<Stream> stream;
    ASSERT_TRUE(Stream::Make(device, &stream).ok());
    EXPECT_EQ(gpus_.live_streams(), 1);
  }).join();
  EXPECT_THAT(gpus_.calls("cudaStreamCreate"), ElementsAre("cudaStreamCreateWithPriority -5"));
}

TEST_F(CudaDeviceTest, AStreamServesAgainAndGoesWithItsDevice) {
  // LibTorch's allocator may have memory that belongs to it.
  std::shared_ptr<Device> device = Open(2);
  std::thread([&] {
    ASSERT_TRUE(device->Adopt().ok());
    std::unique_ptr<Stream> first;
    ASSERT_TRUE(Stream::Make(device, &first).ok());
    const StreamHandle handle = first->handle();
    first.reset();
    ASSERT_TRUE(Stream::Make(device, &first).ok());
    EXPECT_EQ(first->handle(), handle);
    std::unique_ptr<Stream> second;
    ASSERT_TRUE(Stream::Make(device, &second).ok());
    EXPECT_NE(second->handle(), handle);
    first->LeaveBehind();
    first.reset();
    second.reset();
    ASSERT_TRUE(Stream::Make(device, &first).ok());
    EXPECT_NE(first->handle(), handle);
  }).join();
  EXPECT_THAT(gpus_.calls("cudaStreamDestroy"), IsEmpty());
  device.reset();
  EXPECT_EQ(gpus_.live_streams(), 1);  // the one that was left behind
}

TEST_F(CudaDeviceTest, KernelsAreLoadedOnceAndGoWithTheirDevice) {
  std::shared_ptr<Device> device = Open(2);
  for (int i = 0; i < 2; ++i) {
    const Device::Scope scope(*device);
    std::unique_ptr<Kernels> kernels;
    ASSERT_TRUE(Kernels::Load(device, "an image", &kernels).ok());
  }
  EXPECT_EQ(gpus_.calls("cuModuleLoadData").size(), 1u);
  EXPECT_THAT(gpus_.calls("cuModuleUnload"), IsEmpty());
  device.reset();
  EXPECT_EQ(gpus_.calls("cuModuleUnload").size(), 1u);
}

TEST_F(CudaDeviceTest, ErrorsNameTheFunctionAndAreForgotten) {
  gpus_.FailNext("cuDevicePrimaryCtxRetain", 2);
  std::shared_ptr<Device> device;
  const Status status = Device::Open(gpus_.cuda(), 1, &device);
  EXPECT_EQ(status.code(), StatusCode::kBackend);
  EXPECT_EQ(status.message(),
            "device 1: cuDevicePrimaryCtxRetain: out of memory (cudaErrorFake, 2)");
  EXPECT_EQ(device, nullptr);
  // Or LibTorch would find it after its own next call.
  EXPECT_EQ(gpus_.calls("cudaGetLastError").size(), 1u);
}

TEST_F(CudaDeviceTest, AnEventThatIsNotReachedLeavesNoErrorBehind) {
  const std::shared_ptr<Device> device = Open(0);
  EventPool pool(device);
  const EventPtr event = Take(pool);
  gpus_.Hold();
  ASSERT_TRUE(event->Record(gpus_.MakeStream()).ok());
  bool reached = true;
  EXPECT_TRUE(event->Poll(&reached).ok());
  EXPECT_FALSE(reached);
  EXPECT_EQ(gpus_.calls("cudaGetLastError").size(), 1u);
  gpus_.Release();
  EXPECT_TRUE(event->Poll(&reached).ok());
  EXPECT_TRUE(reached);
  EXPECT_EQ(gpus_.calls("cudaGetLastError").size(), 1u);
}

TEST_F(CudaDeviceTest, AnErrorOfTheDeviceIsSeenAtAnEvent) {
  const std::shared_ptr<Device> device = Open(0);
  EventPool pool(device);
  const EventPtr event = Take(pool);
  gpus_.FailNext("cudaEventQuery", 700);
  bool reached = true;
  const Status status = event->Poll(&reached);
  EXPECT_THAT(status.message(), HasSubstr("cudaEventQuery: a fake error"));
  EXPECT_FALSE(reached);
}

TEST_F(CudaDeviceTest, EventsComeBackWithTheirLastReference) {
  const std::shared_ptr<Device> device = Open(0);
  {
    EventPool pool(device);
    EventPtr first = Take(pool);
    const EventPtr kept = first;
    first.reset();
    // Whoever has `kept` may still wait for it: it must not mark another place.
    EXPECT_NE(Take(pool)->handle(), kept->handle());
    EXPECT_EQ(gpus_.live_events(), 2);
    const EventPtr again = Take(pool);
    EXPECT_EQ(gpus_.live_events(), 2);
  }
  EXPECT_EQ(gpus_.live_events(), 0);
}

TEST_F(CudaDeviceTest, EventsMayOutliveTheirPool) {
  const std::shared_ptr<Device> device = Open(0);
  auto pool = std::make_unique<EventPool>(device);
  EventPtr event = Take(*pool);
  pool.reset();
  EXPECT_EQ(gpus_.live_events(), 1);
  event.reset();
  EXPECT_EQ(gpus_.live_events(), 0);
}

TEST_F(CudaDeviceTest, AnEventThatIsUsedAgainHoldsUpNobodyLonger) {
  const std::shared_ptr<Device> device = Open(0);
  EventPool pool(device);
  StreamHandle producer = gpus_.MakeStream();
  StreamHandle ours = gpus_.MakeStream();
  char data = 0;
  char seen = 0;
  gpus_.Hold();
  gpus_.PutWrite(producer, &data, 7, 1);
  EventPtr event = Take(pool);
  ASSERT_TRUE(event->Record(producer).ok());
  ASSERT_TRUE(event->Block(ours).ok());
  const EventHandle handle = event->handle();
  event.reset();
  const EventPtr again = Take(pool);
  EXPECT_EQ(again->handle(), handle);
  ASSERT_EQ(gpus_.cuda().MemcpyAsync(&seen, &data, 1, CopyKind::kDeviceToDevice, ours),
            Error::kSuccess);
  // A later place of the same event, behind the wait: whoever waited for it would wait for itself.
  ASSERT_TRUE(again->Record(ours).ok());
  gpus_.Release();
  gpus_.RunDevices();
  EXPECT_EQ(seen, 7);
}

TEST_F(CudaDeviceTest, WorkIsReadyWhereItsProducerIs) {
  const std::shared_ptr<Device> device = Open(0);
  EventPool pool(device);
  StreamHandle producer = gpus_.MakeStream();
  StreamHandle ours = gpus_.MakeStream();
  StreamHandle optimizer = gpus_.MakeStream();
  char gradient = 0;
  char reduced = 0;
  char used = 0;
  std::atomic<bool> open{false};
  gpus_.PutGate(producer, open);
  DeviceWork work;
  work.device = device;
  gpus_.PutWrite(producer, &gradient, 5, 1);
  ASSERT_TRUE(NoteReady(pool, producer, &work).ok());
  ASSERT_TRUE(work.ready->Block(ours).ok());
  ASSERT_EQ(gpus_.cuda().MemcpyAsync(&reduced, &gradient, 1, CopyKind::kDeviceToDevice, ours),
            Error::kSuccess);
  work.done = Take(pool);
  ASSERT_TRUE(work.done->Record(ours).ok());
  ASSERT_TRUE(AwaitDone(work, optimizer).ok());
  ASSERT_EQ(gpus_.cuda().MemcpyAsync(&used, &reduced, 1, CopyKind::kDeviceToDevice, optimizer),
            Error::kSuccess);
  gpus_.RunDevices();
  EXPECT_EQ(used, 0);
  open = true;
  gpus_.RunDevices();
  EXPECT_EQ(used, 5);
}

TEST_F(CudaDeviceTest, TheDefaultStreamIsThatOfTheTensorsDevice) {
  const std::shared_ptr<Device> device = Open(3);  // the thread itself has chosen none
  EventPool pool(device);
  StreamHandle ours = gpus_.MakeStream();
  char gradient = 0;
  char reduced = 0;
  char used = 0;
  std::atomic<bool> open{false};
  {
    const Device::Scope scope(*device);
    gpus_.PutGate(nullptr, open);
    gpus_.PutWrite(nullptr, &gradient, 5, 1);
  }
  DeviceWork work;
  work.device = device;
  ASSERT_TRUE(NoteReady(pool, nullptr, &work).ok());
  ASSERT_TRUE(work.ready->Block(ours).ok());
  ASSERT_EQ(gpus_.cuda().MemcpyAsync(&reduced, &gradient, 1, CopyKind::kDeviceToDevice, ours),
            Error::kSuccess);
  work.done = Take(pool);
  ASSERT_TRUE(work.done->Record(ours).ok());
  gpus_.RunDevices();
  open = true;
  gpus_.RunDevices();
  EXPECT_EQ(reduced, 5);

  gpus_.PutGate(ours, open);
  open = false;
  work.done = Take(pool);
  ASSERT_TRUE(work.done->Record(ours).ok());
  ASSERT_TRUE(AwaitDone(work, nullptr).ok());
  const Device::Scope scope(*device);
  ASSERT_EQ(gpus_.cuda().MemcpyAsync(&used, &reduced, 1, CopyKind::kDeviceToDevice, nullptr),
            Error::kSuccess);
  gpus_.RunDevices();
  EXPECT_EQ(used, 0);
  open = true;
  gpus_.RunDevices();
  EXPECT_EQ(used, 5);
}

TEST_F(CudaDeviceTest, ACaptureIsRefused) {
  const std::shared_ptr<Device> device = Open(0);
  EventPool pool(device);
  StreamHandle stream = gpus_.MakeStream();
  gpus_.SetCapturing(stream);
  DeviceWork work;
  work.device = device;
  const Status status = NoteReady(pool, stream, &work);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("CUDA graph"));
  EXPECT_EQ(work.ready, nullptr);
  // A capture records what is put into the stream.
  EXPECT_TRUE(gpus_.calls("cudaEventRecord").empty());
}

TEST_F(CudaDeviceTest, AWaitInACaptureIsRefused) {
  DeviceWork work;
  work.device = Open(0);
  EventPool pool(work.device);
  work.done = Take(pool);
  StreamHandle stream = gpus_.MakeStream();
  gpus_.SetCapturing(stream);
  const Status status = AwaitDone(work, stream);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("CUDA graph"));
  EXPECT_THAT(gpus_.calls("cudaStreamWaitEvent"), IsEmpty());
  EXPECT_TRUE(AwaitDone(work, gpus_.MakeStream()).ok());
}

TEST_F(CudaDeviceTest, AThreadOfOursMayLookWhileAnotherCaptures) {
  const std::shared_ptr<Device> device = Open(1);
  EventPool pool(device);
  const EventPtr event = Take(pool);
  gpus_.SetCapturing(gpus_.MakeStream());
  bool reached = false;
  EXPECT_FALSE(event->Poll(&reached).ok());
  std::thread([&] {
    ASSERT_TRUE(device->Adopt().ok());
    const Status status = event->Poll(&reached);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }).join();
  EXPECT_TRUE(reached);
}

TEST_F(CudaDeviceTest, WorkOfTheHostIsNotTakenForThatOfAGpu) {
  DeviceWork work;
  core::Work& of_gpu = work;
  EXPECT_EQ(&AsDeviceWork(of_gpu), &work);
  core::Work of_host;
  of_host.request.key = core::Key::Named(core::kWorldSet, "w");
  EXPECT_DEATH(AsDeviceWork(of_host), "\"w\".*that of the host");
}

TEST_F(CudaDeviceTest, WhatWasNeverLaunchedIsDone) {
  DeviceWork work;
  work.device = Open(0);
  EXPECT_TRUE(AwaitDone(work, gpus_.MakeStream()).ok());
  EXPECT_TRUE(gpus_.calls("cudaStreamWaitEvent").empty());
}

TEST(CudaApiTest, VersionsAreReadable) {
  EXPECT_EQ(VersionText(13000), "13.0");
  EXPECT_EQ(VersionText(12080), "12.8");
  EXPECT_EQ(VersionText(11080), "11.8");
}

TEST(CudaApiTest, WithoutAGpuItSaysWhatIsMissing) {
  Library library;
  const Status status = Load(&library);
  if (status.ok()) {
    EXPECT_GE(library.version, 11000);
    EXPECT_FALSE(library.runtime_path.empty());
    GTEST_SKIP() << "there is a GPU here";
  }
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(),
              ::testing::AnyOf(HasSubstr("no CUDA runtime was found: "),
                               HasSubstr("no GPU driver was found: "),
                               HasSubstr("cudaGetDeviceCount"), HasSubstr("there is no GPU")));
}

}  // namespace
}  // namespace sirtaki::ops::cuda
