import sys; sys.path.insert(0,'tests/emulator'); sys.path.insert(0,'.')
import emu_plugin, torch, random, itertools
from mor_kernels.ops.scatter_back import cuda as sc, eager as se
from mor_kernels.ops.route import cuda as rc, eager as re_
torch.utils.deterministic.fill_uninitialized_memory=True
torch.use_deterministic_algorithms(True)
R=random.Random(int(sys.argv[1]) if len(sys.argv)>1 else 0)
g=torch.Generator().manual_seed(R.randrange(10**6))
F=[torch.float32,torch.bfloat16,torch.float16]
def rnd(shape,dt,strided=0):
    if strided==1: return torch.randn(*shape[:-1],2*shape[-1],generator=g).to(dt)[...,::2]
    if strided==2: return torch.randn(shape[1],shape[0],shape[2],generator=g).to(dt).transpose(0,1)
    if strided==3: return torch.randn(*shape[:-1],1,generator=g).to(dt).expand(shape)
    return torch.randn(shape,generator=g).to(dt)
def close(a,b,dt,name,terms=1):
    a,b=a.double(),b.double()
    assert a.shape==b.shape,(name,a.shape,b.shape)
    assert torch.equal(a.isnan(),b.isnan()),name+' nan'
    if a.numel():
        a,b=a.nan_to_num(),b.nan_to_num()
        tol=4*torch.finfo(dt).eps*(b.abs()+.02*b.abs().max())+1e-5*b.abs().max()+1e-6*terms**.5
        assert ((a-b).abs()<=tol).all(),(name,((a-b).abs()-tol).max())
def idx(B,k,N,bad):
    out=[]
    for _ in range(B):
        p=torch.randperm(N,generator=g)[:k]; p=torch.cat([p,torch.full((k-len(p),),-1)])
        m=torch.rand(k,generator=g)
        p=torch.where(m<.25,-1,p)
        if bad: p=torch.where((m>.85),torch.tensor([N,N+7,2**40,-9])[torch.randint(4,(k,),generator=g)],p)
        out.append(p)
    return torch.stack(out) if B else torch.empty(0,k,dtype=torch.int64)
for it in range(120):
    B,N,k=R.choice([1,2,3]),R.choice([0,1,5,37,130]),R.choice([0,1,9,40,150]); D=R.choice([0,1,7,8,16,120,960,1032,2048,2304])
    if D>1000: N,k=min(N,5),min(k,9)
    k=min(k,N+3)
    dt,fd=R.choice(F),R.choice(F)
    i=idx(B,k,N,True); none=torch.where((i>=0)&(i<N),i,-1)
    res=R.choice(['block','delta','none'])
    x=rnd((B,N,D),dt,R.choice([0,0,0,1,2])) ; u=rnd((B,k,D),fd,R.choice([0,0,0,1,2])); ga=rnd((B,k,1),torch.float32)[...,0] if R.random()<.7 else None
    if R.random()<.3 and D: # poison what should not be read
        u=u.clone(); u[none<0]=float('nan')
        if ga is not None: ga=torch.where(none<0,torch.nan,ga)
    out=sc.scatter_back(x,u,i,ga,res); want=se.scatter_back(x,u,none,ga,res) if N else x
    close(out,want,dt,'out')
    kept=torch.zeros(B,N+1,dtype=torch.bool).scatter(1,torch.where(none<0,N,none),True)[:,:N]
    assert torch.equal(out[~kept],x[~kept])
    y=x.clone(memory_format=torch.preserve_format); sc.scatter_back_in_place(y,u,i,ga,res)
    assert torch.equal(y,out) or out.isnan().any()
    dy=rnd((B,N,D),dt,R.choice([0,0,0,1,2,3]))
    got=sc.scatter_back_backward(dy,x if res=='delta' and ga is not None else None,u if ga is not None else None,i,ga,fd,res)
    if N:
        dd=lambda t: None if t is None else t.double()
        want=se.scatter_back_backward(dd(dy),dd(x) if res=='delta' and ga is not None else None,dd(u) if ga is not None else None,none,dd(ga),torch.float64,res)
        for a,b,t,n in zip(got,want,(dt,fd,torch.float32),('dx','du','dg')): close(a,b,t,n,D)
    else: assert not got[1].any() and not got[2].any()
print('scatter ok')
for it in range(150):
    B,N=R.choice([1,2,3]),R.choice([1,5,37,130,300]); D=R.choice([0,1,7,8,16,120,256,960,1032,2048,2304])
    if D>1000: N=min(N,37)
    dt,wd=R.choice(F),R.choice(F)
    cand=None; C=N
    if R.random()<.5:
        C=R.choice([0,1,N//2,N]); cand=torch.stack([torch.cat([torch.randperm(N,generator=g)[:(m:=R.randint(0,C))].sort().values,torch.full((C-m,),-1)]) for _ in range(B)])
    k=R.randint(0,C)
    sl=torch.randint(0,N+1,(B,),generator=g).to(R.choice([torch.int32,torch.int64])) if R.random()<.5 else None
    x=rnd((B,N,D),dt,R.choice([0,0,0,1,2])); w=rnd((D,),wd) if R.random()<.7 else None
    lg=torch.randn(B,C,generator=g); act=R.choice(['sigmoid','tanh','none']); T=R.choice([1.,.5,3.])
    rows,ind,gates,logits,counts=re_.route(x,w,None if w is not None else lg,cand,sl,None,k,act,.3,T,'logit')
    if C and R.random()<.2: logits=logits.clone(); logits[0,0]=float('nan')
    dr=rnd((B,k,D),dt); dg=torch.randn(B,k,generator=g); dl=torch.randn(B,C,generator=g)
    dl=torch.where(torch.rand(B,C,generator=g)<.4,0,dl)
    if R.random()<.2 and D: # rows with gradient 0 are not read: past seqlens
        if sl is not None: x=x.clone(); x[torch.arange(N)>=sl[:,None]]=float('nan')
    a=(dr,dg,dl,x,w,logits,cand,sl,ind,act,.3,T)
    got=rc.route_backward(*a); 
    d=lambda t: t.double() if t is not None and t.is_floating_point() else t
    try: want=re_.route_backward(*[d(t) if isinstance(t,torch.Tensor) else t for t in a])
    except Exception as e:
        assert C==0 or N==0,e; continue
    for p,q,t,n in zip(got,want,(dt,wd,torch.float32),('dx','dw','dl')): close(p,q,t,n,B*N)
print('route ok')
