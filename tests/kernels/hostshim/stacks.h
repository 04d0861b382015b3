// Stacks of fibers, and what sanitizers are told about them. Part of runtime.cpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#ifdef SHIM_TSAN
extern "C" {
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void* __tsan_get_current_fiber();
void __tsan_acquire(void*);
void __tsan_release(void*);
}
constexpr size_t STACK_BYTES = 64 * 1024;
static void acquire(void* sync) { __tsan_acquire(sync); }
static void release(void* sync) { __tsan_release(sync); }
#else
constexpr size_t STACK_BYTES = 256 * 1024;
static void acquire(void*) {}
static void release(void*) {}
#endif
#ifdef SHIM_ASAN
extern "C" {
void __sanitizer_start_switch_fiber(void**, const void*, size_t);
void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
}
#endif

namespace shim {

#if defined(__x86_64__)
typedef void* Context;
extern "C" void shim_switch(void** save, void* load);
asm(R"(.text
.globl shim_switch
.type shim_switch,@function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch,.-shim_switch
)");
static void switch_context(Context* save, Context load) { shim_switch(save, load); }
static void make_context(Context* context, char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(stack + STACK_BYTES - 72);  // so that `entry` starts as after a call
  *top = 0;
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int callee_saved = 0; callee_saved < 6; callee_saved++) *--top = 0;
  *context = top;
}
#else
typedef ucontext_t* Context;
static void switch_context(Context* save, Context load) {
  if (!*save) *save = new ucontext_t;
  swapcontext(*save, load);
}
static void make_context(Context* context, char* stack, void (*entry)()) {
  if (!*context) *context = new ucontext_t;
  getcontext(*context);
  (*context)->uc_stack.ss_sp = stack;
  (*context)->uc_stack.ss_size = STACK_BYTES;
  (*context)->uc_link = nullptr;
  makecontext(*context, entry, 0);
}
#endif

static char* new_stack() {  // by system call: allocators are watched
  return reinterpret_cast<char*>(syscall(SYS_mmap, nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
}

}  // namespace shim
